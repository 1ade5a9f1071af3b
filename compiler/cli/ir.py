"""The command `ir`: a plan's program after a pass, as text, as the changes of the pass, or as a
graph.
"""

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from .command import Command, plan_argument
from .compile import load
from .output import UsageError, as_file

if TYPE_CHECKING:
    from ..ir import Program


def ir(options: Namespace) -> None:
    """`scalec ir`."""
    from ..ir.printer import print_ir
    from ..syntax.diagnostics import listing
    from ..tuning.lowering import PASS_NAMES

    stage = options.after or options.diff or PASS_NAMES[-1]
    if stage not in PASS_NAMES:
        raise UsageError(f"unknown pass `{stage}`; passes, in order: {listing(PASS_NAMES)}")
    program = load(options.plan, stage).program
    if program.after != stage:
        raise UsageError(
            f"`{options.plan}` is IR from after `{program.after}`, which comes after `{stage}`"
        )
    as_file()
    if options.diff:
        _show_change(options, program)
    elif options.graph:
        from ..reports.ir_graph import print_graph

        sys.stdout.write(print_graph(program, options.graph))
    else:
        sys.stdout.write(print_ir(program))


def _show_change(options: Namespace, program: "Program") -> None:
    """The lines of IR text that a pass has changed, with the lines around them."""
    from difflib import unified_diff

    from ..ir.printer import print_ir
    from ..tuning.lowering import PASS_NAMES

    before = PASS_NAMES[max(PASS_NAMES.index(program.after) - 1, 0)]
    old = print_ir(load(options.plan, before).program).splitlines()
    new = print_ir(program).splitlines()
    lines = unified_diff(old, new, f"after {before}", f"after {program.after}", n=2, lineterm="")
    print("\n".join(lines) or f"`{program.after}` changes nothing")


def _arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    parser.add_argument(
        "--after", metavar="PASS", help="the pass; an unknown name lists all passes"
    )
    help = "print what this pass has changed, as a unified diff of IR text"
    parser.add_argument("--diff", metavar="PASS", help=help)
    help = (
        "print a graph in place of IR text: ops and regions are nodes, values with their types"
        " edges"
    )
    parser.add_argument("--graph", choices=("dot", "graphml", "json"), help=help)


COMMAND = Command(
    ir,
    _arguments,
    "Prints the intermediate representation of a plan after a pass, by default the last.  The"
    " text can be\n"
    "saved, edited and compiled instead of the plan; as a graph it is for Graphviz or networkx.",
    "scalec ir plans/tiny_llama.scale --after insert_collectives",
)
