"""The modules that a program's user ops come from: copied beside `train.py`, which imports them.

Purpose: an output folder is whole, and what was compiled is what runs.  Non-goals: what the modules say.
"""

import sys
from pathlib import Path

from .. import __version__
from ..diagnostics import Diagnostic, PlanError
from ..ir import Program, base, types, walk
from ..limits import load
from ..ops.user import module_and_function
from ..source import Source
from .words import TAKEN, file_word, singular


def modules(program: Program) -> tuple[str, ...]:
    """The modules that a program imports for its user ops.  Raises PlanError for a name that it has another use for."""
    ops = {module_and_function(op)[0]: op for op in walk(program.region.body) if op.kind == "call"}
    for name in sorted(ops.keys() & _taken(program)):
        help = "give the file another name"
        raise PlanError([Diagnostic("E0215", f"a program cannot import `{name}`", ops[name].span, "taken", help=help)])
    return tuple(sorted(ops))


def copies(program: Program, source: Source) -> dict[str, str]:
    """The files of those modules, found beside the plan.  Raises PlanError where one cannot be read."""
    files = {f"{name}.py": load(Path(source.path).parent / f"{name}.py") for name in modules(program)}
    head = f"# Written by scalec {__version__}: a copy of the file beside {file_word(source.path)}; change that one.\n"
    return {name: head + file.text for name, file in files.items()}


def copied(program: Program, folder: Path) -> dict[str, Source]:
    """The files of those modules as they lie beside `train.py`.  Raises PlanError where one cannot be read."""
    return {f"{name}.py": load(folder / f"{name}.py") for name in modules(program)}


def _taken(program: Program) -> set[str]:
    """Names of values and repeats, of what programs give meaning to, and of what they may import."""
    own = {base(name).lstrip("_") for name in types(program)} | {singular(dim.name) for dim in program.dims}
    return own | TAKEN | {"scalec", "train", *sys.stdlib_module_names}
