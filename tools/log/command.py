"""The commands on logs of runs: `log`, losses, norms and speed; `loads`, the experts that
tokens chose.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...compiler.cli.command import Command, file_path
from ...compiler.cli.output import UsageError, put, show

T = TypeVar("T")

MOST = 8
"""The number of runs that a page has colours for."""


def log(options: Namespace) -> None:
    """`scalec log`."""
    from shutil import get_terminal_size

    from attrs import evolve

    from .run_log import MARK, page, read, text

    if len(options.runs) > MOST:
        raise UsageError(f"log takes at most {MOST} runs")
    runs = [load_run(run, read, "loss: no step is logged yet") for run in options.runs]
    if len({run.name for run in runs}) < len(runs):
        runs = [evolve(run, name=str(path)) for run, path in zip(runs, options.runs, strict=True)]
    if options.output is None:
        show(text(runs, get_terminal_size((100, 24)).columns))
    else:
        put(options.output, page(runs), "output", MARK)


def loads(options: Namespace) -> None:
    """`scalec loads`."""
    from .expert_load import MARK, parse_log, svg, text

    run = load_run(
        options.run,
        parse_log,
        "loads of experts: the plan has no `route`, or no step is logged yet",
    )
    if options.svg is None:
        show(text(run))
    else:
        put(options.svg, svg(run), "svg", MARK)


def load_run(run: Path, read: Callable[[str, str], T | None], lacks: str) -> T:
    """The result of `read` for the name and the log of a run; None means that it `lacks`
    something.  UsageError.

    The last line is left out where it is cut off: the run goes on, or was ended.
    """
    path = run / "log.jsonl" if run.is_dir() else run
    try:
        text = path.read_text(encoding="utf-8")
        result = read(path.resolve().parent.name, text[: text.rfind("\n") + 1])
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UsageError(
            f"cannot read `{path}`: {why}; name the folder of a run, such as runs/NAME"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"`{path}` is no log of a run: a line of it is no record of a step"
        ) from error
    if result is None:
        raise UsageError(f"`{path}` has no {lacks}")
    return result


def _log_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs", type=file_path, nargs="+", metavar="RUN", help="folders of runs, or their log.jsonl"
    )
    help = "write a page with pictures, which needs no network"
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=help)


LOG = Command(
    log,
    _log_arguments,
    "Draws the losses, the gradient norm and the speed of a run over its steps, from its log;"
    " of several runs on one\n"
    "scale.  With -o it writes a page with the pictures.",
    "scalec log runs/tiny_llama -o log.html",
)


def _loads_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "run", type=file_path, metavar="RUN", help="the folder of a run, or its log.jsonl"
    )
    parser.add_argument("--svg", type=file_path, metavar="FILE", help="write a picture")


LOADS = Command(
    loads,
    _loads_arguments,
    "Draws which experts the tokens of a run chose, from its log: the least and the most load"
    " of each layer at\n"
    "some steps; or writes a picture of all experts over all logged steps.  A load is an"
    " expert's part of the\n"
    "choices of its layer, in equal shares: 1 where all experts are chosen as often.",
    "scalec loads runs/08_experts --svg loads.svg",
)
