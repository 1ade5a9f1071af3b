"""The modules that a program's user ops come from: copied beside `train.py`, which imports them,
with what they import.

The file of its cluster's hardware is copied too.  Purpose: an output folder is whole, and what was
compiled is what runs.  Non-goals: what the files say.
"""

from pathlib import Path

from .. import __version__
from ..frontend.user_ops import cannot_import, files
from ..ir import Program, base
from ..ops.user import module_and_function
from ..syntax.limits import MAX_WRITTEN_BYTES, load
from ..syntax.source import Source, Span
from .naming import TAKEN, file_word, singular


def modules(program: Program) -> tuple[str, ...]:
    """The modules that a program imports for its user ops.

    Raises PlanError for a name that it has another use for.
    """
    calls = _calls(program)
    for name in sorted(calls.keys() & _taken(program)):
        raise cannot_import(name, calls[name])
    return tuple(sorted(calls))


def copies(program: Program, source: Source) -> dict[str, str]:
    """The modules' files beside the plan, and the files that they import.

    Raises PlanError where one cannot be copied.
    """
    head = (
        f"# Written by scalec {__version__}: a copy of the file beside"
        f" {file_word(source.path)}; change that one.\n"
    )
    files_of_plan = copied(program, Path(source.path).parent)
    return {name: head + file.text for name, file in files_of_plan.items()}


def copied(program: Program, folder: Path) -> dict[str, Source]:
    """The modules' files in a folder, and the files of the folder that they import.

    Raises PlanError where one cannot be read.
    """
    sources: dict[str, Source] = {}
    for name in modules(program):
        sources |= files(name, folder, _calls(program)[name])
    if program.cluster.hardware:
        from ..analysis.hardware import own_file

        hardware = load(own_file(program.cluster), most=MAX_WRITTEN_BYTES)
        sources[Path(program.cluster.hardware).name] = hardware
    return sources


def _calls(program: Program) -> dict[str, Span]:
    """A call of each module."""
    return {module_and_function(op)[0]: op.span for op in program.ops if op.kind == "call"}


def _taken(program: Program) -> set[str]:
    """Names of values and repeats, and names that programs give meaning to."""
    values = {base(name).lstrip("_") for name in program.types}
    repeats = {singular(dim.name) for dim in program.dims}
    return values | repeats | TAKEN
