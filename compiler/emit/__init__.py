"""From the final IR to the files of a training program.

Purpose: `train.py`, the files that it reads, and `plan.json`; and the check that the one does what
the other says.  Non-goals: writing them (`write_files`).
"""

from collections.abc import Mapping, Sequence

from ..analysis.certificate import Proof, Tried
from ..analysis.elastic import every_size
from ..ir import Program
from ..syntax.source import Source
from .plan_json import known_by, known_unpadded, plan_json
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
    """The files of the program, by name; `modules` among them, those of user ops as they are
    copied.

    `tried` are the functions of these that were tried.  `model` is the plan before any placement,
    from which all is recompiled for checks; of IR text, the program.
    """
    known, copies = known_by(model or program), modules or {}
    files = program_files(program, source, proof, known, known_unpadded(model or program), tried)
    check_files(files)
    matched = min(check(files["train.py"], each) for each in every_size(program))
    account = plan_json(program, source, model or program, proof, matched, copies, tried=tried)
    return {**files, "plan.json": account, **copies}
