"""`scalec doctor`: looks at this machine, or under a launcher at all nodes of a job, before a
plan is trained there.
"""

import sys
from argparse import ArgumentParser, Namespace
from json import dumps
from pathlib import Path

from ...compiler.cli.command import PLAN, Command, file_path, need, plan_path

PROGRAM = "scalec.tools.doctor"
"""The module that looks: the compiler itself does not import torch."""


def doctor(options: Namespace) -> int:
    """`scalec doctor`; returns the exit status, 1 where a check fails and the plan could not
    train.
    """
    import subprocess
    from tempfile import TemporaryDirectory

    need("torch", "training")
    words = ["--json"] if options.json else []
    if options.out:
        words += ["--out", str(options.out)]
    sys.stdout.flush()
    with TemporaryDirectory() as folder:
        if options.plan:
            from ...compiler.cli.compile import load
            from ...compiler.emit.naming import run_word
            from ...compiler.reports.job import needs

            plan, path = load(options.plan), Path(folder, "needs.json")
            path.write_text(
                dumps(needs(plan.program, run_word(plan.source.path))), encoding="utf-8"
            )
            words.insert(0, str(path))
        return subprocess.run([sys.executable, "-m", PROGRAM, *words]).returncode


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "plan",
        type=plan_path,
        nargs="?",
        metavar="PLAN",
        help=f"{PLAN}; without one, nothing is needed",
    )
    help = "the run's folder (default: runs/ and the plan's name)"
    parser.add_argument("--out", type=file_path, metavar="DIR", help=help)
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the report of each rank"
    )


COMMAND = Command(
    doctor,
    _arguments,
    "Compares versions, clocks, GPUs, links, ports, the run's folder, disk and limits with"
    " each other and with\n"
    "the needs of the plan, a line each: ok, warn or fail, and what to do.  Looks at this"
    " machine, with a process\n"
    "for each rank of a node if it has as many GPUs, or cores, and else with one, without"
    " links and ports; under\n"
    "torchrun --no-python, at all nodes.  Exits with status 1 if anything failed.",
    "scalec doctor plans/tiny_llama.scale",
)
