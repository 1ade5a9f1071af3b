"""`scalec compile --target dtensor`: the files of a program of torch alone, and the line that starts it."""

from pathlib import Path
from typing import TYPE_CHECKING

from .streams import UsageError

if TYPE_CHECKING:
    from ..analysis.certificate import Proof
    from ..ir import Program
    from ..syntax.source import Source

DTENSOR = "dtensor"
"""The target of programs of torch alone; those of the other one use scalec's runtime."""


def write_torch(program: "Program", source: "Source", model: "Program", proof: "Proof | None", folder: Path) -> str:
    """Writes the program of a plan into `folder`; returns what there is to say.  Raises PlanError."""
    from ..emit.dtensor import emit
    from ..emit.write_files import OutputError, write
    from ..reports.summary import headline, launch

    script = folder / "train.py"
    try:
        write(folder, emit(program, source, model, proof))
    except OutputError as error:
        raise UsageError(str(error)) from error
    shown = f"verified: {proof.summary()}" if proof else "not verified: --no-verify"
    start = f"to train on the bytes of a file:\n\n  {launch(program).command(script)} FILE"
    return f"{headline(program)}\n\n{shown}\nwrote {script} and {script.with_name('plan.json')}\n{start}"
