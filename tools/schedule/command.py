"""The command `schedule`: each rank's actions in a plan's pipeline over time, drawn or written
to files.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...compiler.analysis.memory import accounts
from ...compiler.analysis.stage_schedule import estimate_times
from ...compiler.cli.command import Command, file_path, plan_argument
from ...compiler.cli.compile import load
from ...compiler.cli.output import UsageError, check_replaceable, replace
from ...compiler.ir import Program
from ...compiler.schedules.timeline import Times
from ...compiler.syntax.diagnostics import listing, wants_colour
from .figures import figures
from .picture import MARK, Picture, of_plan
from .rows import html, svg
from .terminal import drawing

TIMES = {"f": "forward", "b": "input", "w": "weight", "comm": "send"}
"""Times of a stage's forward, of the two parts of its backward, and of a message: the fields of
`Times`.
"""

FORMS = {
    "csv": "the order of actions, as torch.distributed.pipelining reads it: a line for each rank",
    "svg": "a picture",
    "html": "a page to zoom into, by itself",
    "trace": "a trace for ui.perfetto.dev",
}
"""Forms that can be written to a file, each by an option of its name."""

_WITHIN = (0.001, 1000)


def schedule(options: Namespace) -> None:
    """`scalec schedule`."""
    overrides = times(options.times)
    program = load(options.plan).program
    if program.pipeline is None:
        what = (
            "give its mesh an axis, for instance `pp = 4`, and its shard section `layers over pp`"
        )
        raise UsageError(f"`{options.plan}` has no pipeline, so nothing to draw: {what}")
    picture = _picture(program, options.unit, overrides)
    paths = dict[str, Path]()
    for form in FORMS:
        path = getattr(options, form)
        if path is not None:
            paths[form] = path
    _check_apart(paths)
    table = _table(picture, program)
    if paths:
        _write(picture, table, paths)
    else:
        print(f"{picture.title}\n{picture.subtitle}\n\n{_grid(picture)}\n\n{table}")


def _check_apart(paths: dict[str, Path]) -> None:
    """Each form has a file of its own."""
    forms: dict[Path, str] = {}
    for form, path in paths.items():
        first = forms.setdefault(path.resolve(), form)
        if first != form:
            raise UsageError(f"--{first} and --{form} both write `{path}`: choose two files")


def _table(picture: "Picture", program: "Program") -> str:
    """A line for each rank: its time and its memory."""
    return figures(picture, accounts(program))


def _grid(picture: "Picture") -> str:
    """The drawing for the terminal."""
    from shutil import get_terminal_size

    return drawing(picture, get_terminal_size((120, 24)).columns, colour=wants_colour(sys.stdout))


def _write(picture: "Picture", table: str, paths: dict[str, Path]) -> None:
    """Writes all files, or no file if one of them cannot be replaced."""
    texts = {form: _text(form, picture, table) for form in paths}
    for form, path in paths.items():
        check_replaceable(path, texts[form], form, MARK)
    for form, path in paths.items():
        replace(path, texts[form], form)
    print("wrote " + " and ".join(map(str, paths.values())))


def _text(form: str, picture: "Picture", table: str) -> str:
    """The content of a file of one of the forms."""
    if form == "csv":
        from ...compiler.schedules.csv_file import csv

        return csv(picture.schedule)
    if form == "trace":
        from .trace import trace

        return trace(picture)

    draw = svg if form == "svg" else html
    return draw(picture, table)


def times(text: str) -> dict[str, float]:
    """The times that `--times` sets.  Raises UsageError."""
    overrides: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        if name not in TIMES:
            raise UsageError(
                f"--times has no `{name}`; it takes {listing(TIMES)}, as in --times"
                " f=1,b=1,w=1,comm=0.1"
            )
        if name in overrides:
            raise UsageError(f"--times sets `{name}` twice")
        overrides[name] = _time(name, value)
    return overrides


def _time(name: str, value: str) -> float:
    least, most = _WITHIN
    try:
        time = float(value)
    except ValueError:
        raise UsageError(f"--times sets `{name}` to `{value}`, which is not a number") from None
    if name == "comm" and time == 0:
        return time
    if not least <= time <= most:
        also = "0, or " if name == "comm" else ""
        raise UsageError(f"--times sets `{name}` to {value}, but it takes {also}{least} to {most}")
    return time


def _picture(program: "Program", unit: bool, overrides: dict[str, float]) -> "Picture":
    """All stages alike, or as long as they are estimated to take, except for `overrides`."""
    pipeline = program.pipeline
    assert pipeline, "schedule: no pipeline"
    if unit:
        times = Times.uniform(len(pipeline.stage_to_rank))
    else:
        times = estimate_times(program, pipeline).round_times()
    for name, time in overrides.items():
        times = times.uniform_in(TIMES[name], time)
    unit_of_time = "" if unit or overrides else "forwards of the most expensive stage"
    return of_plan(program, times, unit_of_time)


def _arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    help = "any of f=1,b=1,w=1,comm=0.1, for all stages"
    parser.add_argument("--times", default="", metavar="TIMES", help=help)
    parser.add_argument("--unit", action="store_true", help="draw every stage with f=1,b=1,w=1")
    for form, help in FORMS.items():
        parser.add_argument(f"--{form}", type=file_path, metavar="FILE", help=f"write {help}")


COMMAND = Command(
    schedule,
    _arguments,
    "Draws the pipeline schedule of a plan, one row per rank, with each rank's busy time, idle"
    " time and memory;\n"
    "or writes it to files.  Times are per stage and microbatch: `f` for forward, `b` and `w`"
    " for the input and\n"
    "weight gradients of backward, `comm` for a message between ranks.  By default they are"
    " estimated costs,\n"
    "relative to the most expensive forward, and messages take no time.",
    "scalec schedule plans/tiny_pipeline.scale --times f=1,b=1,w=1,comm=0.1",
)
