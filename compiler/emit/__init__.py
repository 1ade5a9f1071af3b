"""From the final IR to the files of a training program.

Purpose: `train.py` and `plan.json`, and the proof that the one does what the other says.  Non-goals: writing them (`output`).
"""

from ..ir import Program
from ..source import Source
from .program import train_py


def emit(program: Program, source: Source) -> dict[str, str]:
    """The files of the program, by name."""
    return {"train.py": train_py(program, source)}
