"""From the final IR to the files of a training program.

Purpose: `train.py`, the files that it reads, and `plan.json`; and the check that the one does what
the other says.  Non-goals: writing them (`write_files`).
"""

from collections.abc import Mapping, Sequence

from ..analysis.certificate import Proof, Tried
from ..analysis.elastic import every_size
from ..ir import Program
from ..syntax.source import Source
from .plan_json import get_model_hash, get_unpadded_hash, plan_json
from .readback import check, check_files
from .train_py import program_files


def emit(
    program: Program,
    source: Source,
    model: Program | None = None,
    proof: Proof | None = None,
    modules: Mapping[str, str] | None = None,
    tried: Sequence[Tried] = (),
) -> dict[str, str]:
    """The files of the program, by name.

    `modules` are the copied files of user ops; they are among the result.  `tried` are the user
    ops' functions that were tried.  `model` is the plan before any placement, and checks recompile
    everything from it; a program of IR text is its own model.
    """
    model = model or program
    copies = modules or {}
    model_hash = get_model_hash(model)
    files = program_files(program, source, proof, model_hash, get_unpadded_hash(model), tried)
    check_files(files)
    # the one text has to match the IR at every size of an elastic axis
    matched = min(check(files["train.py"], sized) for sized in every_size(program))
    account = plan_json(program, source, model, proof, matched, copies, tried=tried)
    return {**files, "plan.json": account, **copies}
