"""The modules that a program's user ops come from: copied beside `train.py`, which imports them, with what they import.

The file of its cluster's hardware is copied too.
Purpose: an output folder is whole, and what was compiled is what runs.  Non-goals: what the files say.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePath

from .. import __version__
from ..frontend.user_ops import parsed
from ..ir import Program, base
from ..ops.user import module_and_function
from ..syntax.diagnostics import PlanError, wrong
from ..syntax.limits import MAX_WRITTEN_BYTES, load
from ..syntax.source import Source, Span
from .naming import TAKEN, file_word, singular

NOT_OURS = {"scalec", "torch", "train", *sys.stdlib_module_names}
"""The names that a file beside `train.py` must not have: it would hide the program, or a module it imports."""


def modules(program: Program) -> tuple[str, ...]:
    """The modules that a program imports for its user ops.  Raises PlanError for a name that it has another use for."""
    calls = _calls(program)
    for name in sorted(calls.keys() & _taken(program)):
        raise _cannot_import(name, calls[name])
    return tuple(sorted(calls))


def copies(program: Program, source: Source) -> dict[str, str]:
    """Their files beside the plan, with those that they import.  Raises PlanError where one cannot be copied."""
    head = f"# Written by scalec {__version__}: a copy of the file beside {file_word(source.path)}; change that one.\n"
    return {name: head + file.text for name, file in copied(program, Path(source.path).parent).items()}


def copied(program: Program, folder: Path) -> dict[str, Source]:
    """Their files in a folder, with those of it that they import.  Raises PlanError where one cannot be read."""
    found: dict[str, Source] = {}
    for name in modules(program):
        _gather(name, folder, _calls(program)[name], found)
    if program.cluster.hardware:
        from ..analysis.hardware import own_file

        found[Path(program.cluster.hardware).name] = load(own_file(program.cluster), most=MAX_WRITTEN_BYTES)
    return found


def _calls(program: Program) -> dict[str, Span]:
    """A call of each module."""
    return {module_and_function(op)[0]: op.span for op in program.ops if op.kind == "call"}


def _gather(module: str, folder: Path, at: Span, found: dict[str, Source]) -> None:
    """Adds a module's file, and those that it imports from its folder."""
    file = load(folder / f"{module}.py")
    found[f"{module}.py"] = file
    for name in _imports(file, at):
        if (folder / name / "__init__.py").is_file():
            raise _cannot_copy(f"`{module}.py` imports the package `{name}`", at, f"make it one file, `{name}.py`")
        if f"{name}.py" in found or not (folder / f"{name}.py").is_file():
            continue
        if name in NOT_OURS:
            raise _cannot_import(name, at)
        _gather(name, folder, at, found)


def _imports(file: Source, at: Span) -> Iterator[str]:
    """The first words of what a module imports, wherever in it."""
    for node in ast.walk(parsed(file, at)):
        match node:
            case ast.Import(names=names):
                yield from (each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(module=str(name), level=0):
                yield name.partition(".")[0]
            case ast.ImportFrom():
                help = "write `import NAME` or `from NAME import …`: modules lie side by side, in no package"
                raise _cannot_copy(
                    f"`{PurePath(file.path).name}` has a relative import, on its line {node.lineno}", at, help
                )
            case _:
                pass


def _cannot_copy(message: str, at: Span, help: str) -> PlanError:
    return wrong("E0221", message, at, "needs it", help=help)


def _cannot_import(name: str, at: Span) -> PlanError:
    help = "give the file another name"
    return wrong("E0215", f"a program cannot import `{name}`", at, "taken", help=help)


def _taken(program: Program) -> set[str]:
    """Names of values and repeats, of what programs give meaning to, and of what they may import."""
    own = {base(name).lstrip("_") for name in program.types} | {singular(dim.name) for dim in program.dims}
    return own | TAKEN | NOT_OURS
