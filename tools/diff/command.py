"""The command `diff`: two plans, or compiled programs, side by side."""

from argparse import ArgumentParser, Namespace

from ...compiler.analysis.time import get_expected_report
from ...compiler.cli.command import PLAN, Command, plan_path
from ...compiler.cli.compile import load
from ...compiler.cli.output import show
from ...compiler.cli.recheck import load_compiled_plan
from ...compiler.ir import Program
from .differences import as_json, figures, rows, text

DIFFERENT = 1
"""The exit status where plans differ."""


def diff(options: Namespace) -> int:
    """`scalec diff`; returns the exit status."""
    import json

    programs = list[Program]()
    for path in options.plans:
        plan = load_compiled_plan(path) if path.is_dir() else load(path)
        programs.append(plan.program)
    first, second = (figures(program, get_expected_report(program)) for program in programs)
    all_rows = [*rows(first, second)]
    different = [row for row in all_rows if row.differs]
    listed = all_rows if options.all else different
    if options.json:
        show(json.dumps(as_json(listed), indent=2))
    else:
        show(text(programs, listed))
    return DIFFERENT if different else 0


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "plans",
        type=plan_path,
        nargs=2,
        metavar="PLAN",
        help=f"{PLAN}, or a compiled output folder",
    )
    parser.add_argument("--all", action="store_true", help="show what is equal too")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: both figures by section and name"
    )


COMMAND = Command(
    diff,
    _arguments,
    "Shows where two plans differ: where parameters and values lie, collectives, the bytes"
    " that a rank sends, its\n"
    "memory, and the seconds of a step where their GPUs are known.  Exits with status 1 if"
    " they differ.\n"
    "A compiled output folder is taken for the plan that it was compiled from, as it was then.\n"
    "For a pipeline, collectives are those of the rank that sends most, memory that of the"
    " rank that needs most.",
    "scalec diff plans/llama3_70b.scale mine.scale",
)
