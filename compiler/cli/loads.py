"""The command `loads`: which experts the tokens of a run chose, step by step, as a table or a picture."""

from argparse import ArgumentParser, Namespace

from .command import Command, file_path
from .log import read_run
from .output_files import put
from .shown import show


def loads(options: Namespace) -> None:
    """`scalec loads`."""
    from ..reports.expert_load import MARK, read, svg, text

    lacks = "loads of experts: the plan has no `route`, or no step is logged yet"
    found = read_run(options.run, read, lacks)
    if options.svg is None:
        show(text(found))
        return
    put(options.svg, svg(found), "svg", MARK)
    print(f"wrote {options.svg}")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=file_path, metavar="RUN", help="the folder of a run, or its log.jsonl")
    parser.add_argument("--svg", type=file_path, metavar="FILE", help="write a picture")


COMMAND = Command(
    "loads",
    loads,
    _arguments,
    "draw the loads of experts in a run",
    "Draws which experts the tokens of a run chose, from its log: the least and the most load of each layer at\n"
    "some steps; or writes a picture of all experts over all logged steps.  A load is an expert's part of the\n"
    "choices of its layer, in equal shares: 1 where all experts are chosen as often.",
    "scalec loads runs/08_experts --svg loads.svg",
)
