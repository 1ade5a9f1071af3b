"""From the final IR to the files of a training program.

Purpose: `train.py` and `plan.json`, and the check that the one does what the other says.
Non-goals: writing them (`output`).
"""

from ..ir import Program
from ..source import Source
from .plan_json import plan_json
from .program import train_py
from .readback import check


def emit(program: Program, source: Source) -> dict[str, str]:
    """The files of the program, by name."""
    text = train_py(program, source)
    return {"train.py": text, "plan.json": plan_json(program, source, check(text, program))}
