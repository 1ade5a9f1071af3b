"""`scalec calibrate`: lists the ops and messages of some plans, and measures them on this machine.

With `--fit`, it compares a plan's prediction with the steps that a run has profiled.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...compiler.analysis.memory import account
from ...compiler.analysis.time.fit import fit
from ...compiler.analysis.time.profile import beside, ranks_at, strangers
from ...compiler.analysis.time.report import with_ops
from ...compiler.cli.command import PLAN, Command, file_path, need, plan_path, torchrun
from ...compiler.cli.compile import load
from ...compiler.cli.explain import load_profile, report_of
from ...compiler.cli.output import UsageError, cannot_write, show
from ...compiler.ir import Program
from ...compiler.reports.profile import explain_fit
from ...compiler.reports.summary import get_launch
from .work_list import work_list

MARK = b"Written by scalec"
OUTPUT = Path("my_cluster.toml")
NO_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
"""A program that fails where torch sees no GPU: the compiler itself does not import torch."""
QUICK = ("--warm-up", "0.2", "--most", "65536")


def calibrate(options: Namespace) -> None:
    """`scalec calibrate`; on several nodes, or with `--print`, it prints the command for each."""
    if options.fit:
        _fit(options)
        return

    programs, output = [load(path).program for path in options.plans], options.output or OUTPUT
    _check(output)
    listed = output.with_suffix(".json")
    _check(listed)
    launches = [get_launch(program) for program in programs]
    how = max(launches, key=lambda launch: launch.nodes * launch.ranks_per_node)
    only_print = how.nodes > 1 or options.print
    if not only_print:
        _check_device(programs[0])
    try:
        listed.write_text(work_list(programs), encoding="utf-8")
    except OSError as error:
        raise cannot_write(listed, error, "; choose another file with -o") from error
    words = [
        "-m",
        "scalec.tools.calibrate",
        str(listed),
        "-o",
        str(output),
        *(QUICK if options.quick else ()),
    ]
    if only_print:
        print(
            "to measure, run this on each of the nodes:\n\n  torchrun"
            f" {' '.join((*how.options(), *words))}"
        )
        return
    torchrun([*how.options(), *words], how.ranks_per_node)


def _fit(options: Namespace) -> None:
    """Prints where the prediction differs from a run's profile, and which figures of hardware
    would explain it.
    """
    for option in ("output", "quick", "print"):
        if getattr(options, option):
            raise UsageError(f"--fit measures nothing and writes no file: leave out --{option}")
    if len(options.plans) > 1:
        raise UsageError(f"--fit takes one plan, the one of the run in `{options.fit}`")
    plan = load(options.plans[0])
    report = with_ops(report_of(plan))
    profile = load_profile(options.fit, ranks_at(plan.program, report.step.rank))
    device = account(plan.program).device
    if profile.device != device:
        raise UsageError(
            f"`{options.fit}` has steps on {profile.device}, but the plan is for {report.on.name},"
            f" on {device}"
        )
    if others := strangers(profile, plan.program, report.step):
        raise UsageError(f"`{options.fit}` is of another plan: this one has no line {others[0]}")
    fits = fit(plan.program, report.on, profile)
    show(explain_fit(profile, beside(profile, report.step), report, fits))


def _check_device(program: "Program") -> None:
    """UsageError where the plans are for a GPU and torch sees none here.

    The check is here so that the user reads the error once, not from each rank.
    """
    import subprocess

    need("torch", "measuring")
    if (
        account(program).device == "cuda"
        and subprocess.run([sys.executable, "-c", NO_GPU]).returncode
    ):
        raise UsageError(
            "the plans are for a GPU, and this machine has none: calibrate on the machine that"
            " trains"
        )


def _check(path: Path) -> None:
    """Only files that scalec wrote are overwritten."""
    if path.is_dir():
        raise UsageError(f"`{path}` is a folder: name a file with -o")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder `{path.parent}`: choose another file with -o")
    if path.is_file():
        start = path.read_bytes()[:1000]
        if MARK not in start and b'"written_by": "scalec' not in start:
            raise UsageError(f"`{path}` was not written by scalec: choose another file with -o")


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("plans", type=plan_path, nargs="+", metavar="PLAN", help=PLAN)
    help = (
        "the file to write (default my_cluster.toml); beside it lies the list of what is measured"
    )
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=help)
    parser.add_argument(
        "--quick", action="store_true", help="no long warm-up, and only small messages"
    )
    parser.add_argument(
        "--print", action="store_true", help="measure nothing; print the command that does"
    )
    help = (
        "measure nothing; compare the prediction with steps that a run wrote to FOLDER, its"
        " SCALEC_PROFILE"
    )
    parser.add_argument("--fit", type=file_path, metavar="FOLDER", help=help)


COMMAND = Command(
    calibrate,
    _arguments,
    "Measures products, attention, memory-bound ops, the host and the links between ranks, at"
    " the shapes and in\n"
    'the groups of the plans, and writes FILE, for `cluster { hardware = "FILE" }`.  Runs on'
    " this machine, one\n"
    "process per rank; for several nodes it prints the command to run on each.  With --fit it"
    " measures nothing,\n"
    "and says by line where a run's profile differs from the prediction, and which figures"
    " would explain it.",
    "scalec calibrate plans/tiny_llama.scale -o my_cluster.toml",
)
