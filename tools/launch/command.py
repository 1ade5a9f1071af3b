"""`scalec launch`: writes the script that trains a plan on a cluster."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...compiler.cli.command import Command, count, output_arguments, plan_argument
from ...compiler.cli.compile import load, write_lowered_plan
from ...compiler.cli.op_trials import trials
from ...compiler.cli.output import TEXT, UsageError
from ...compiler.emit.naming import run_word
from ...compiler.emit.write_files import OutputError, write
from ...compiler.reports.job import FILES, files

SCHEDULERS = ("slurm", "k8s")


def launch(options: Namespace) -> None:
    """`scalec launch`."""
    if options.scheduler == "k8s" and not options.image:
        raise UsageError("a job of Kubernetes needs an image with scalec in it: --image IMAGE")
    if options.scheduler == "slurm":
        _check_time(options.time, options.grace)
    with trials(options.plan, options.try_functions) as trial:
        plan = load(options.plan)
        folder = Path(write_lowered_plan(plan, options, trial).parent)
    how = {
        name: getattr(options, name)
        for name in ("time", "grace", "cpus", "sbatch", "image", "claim")
    }
    run = run_word(plan.source.path)
    try:
        write(
            folder,
            files(options.scheduler, plan.program, options.plan, run, folder, options.rest, how),
        )
    except OutputError as error:
        raise UsageError(str(error)) from error
    file = folder / FILES[options.scheduler]
    start = {"slurm": f"sbatch {file}", "k8s": f"kubectl apply -f {file}"}[options.scheduler]
    print(f"wrote {file}\nto train:\n\n  {start}")


_NO_LIMIT = ("0", "unlimited", "infinite")
_EARLY = 60
"""Seconds by which Slurm may signal earlier than it is asked to (sbatch, `--signal`)."""


def _check_time(time: str, grace: int) -> None:
    """UsageError unless a job has time to train before Slurm signals it.

    Such a job would go back into the queue for ever.
    """
    if time.lower() in _NO_LIMIT:
        return
    limit = seconds(time)
    if limit is None:
        raise UsageError(f"`--time {time}` is not a time of Slurm's: write H:M:S or D-H:M:S")
    if limit < grace + _EARLY:
        early = f"Slurm signals {grace} s before the end, and up to {_EARLY} s earlier"
        raise UsageError(
            f"`--time {time}` leaves none to train: {early}; give more, or a shorter --grace"
        )


def seconds(time: str) -> int | None:
    """The seconds of a time as Slurm reads it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None of
    anything else.
    """
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    numbers = [days, *parts] if dash else parts
    if len(parts) > 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    # minutes come first, unless there are days or all three parts
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    total = 86_400 * int(days or 0)
    for part, unit in zip(parts, units, strict=False):
        total += int(part) * unit
    return total


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "scheduler", choices=SCHEDULERS, metavar="slurm|k8s", help="the cluster's scheduler"
    )
    parser.usage = "scalec launch [-h] [OPTION ...] slurm|k8s PLAN [-- ARGUMENT ...]"
    help = (
        "Slurm: the time limit, after which the job goes back into the queue (default: %(default)s)"
    )
    parser.add_argument("--time", default="24:00:00", metavar="H:M:S", help=help)
    help = "seconds in which a checkpoint can be saved before a job ends (default: %(default)s)"
    parser.add_argument("--grace", type=count, default=120, metavar="S", help=help)
    help = "CPUs of a rank (default: %(default)s)"
    parser.add_argument("--cpus", type=count, default=8, metavar="N", help=help)
    help = "Slurm: one more option of sbatch, as --sbatch=--partition=gpu; may be repeated"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=help)
    help = (
        "Kubernetes: the image, with scalec in it and the program in its working directory, if"
        " not on the volume"
    )
    parser.add_argument("--image", default="", metavar="IMAGE", help=help)
    help = (
        "Kubernetes: the claim of the shared volume with program, data and runs (default:"
        " %(default)s)"
    )
    parser.add_argument("--claim", default="shared", metavar="NAME", help=help)
    plan_argument(parser)
    output_arguments(parser)
    parser.set_defaults(format=TEXT)


COMMAND = Command(
    launch,
    _arguments,
    "Compiles a plan as `scalec compile` does, and writes DIR/job.sbatch, for Slurm, or"
    " DIR/job.yaml, for\n"
    "Kubernetes, for the nodes, GPUs and memory of the plan.  The job first runs the checks of"
    " `scalec doctor` on\n"
    "all nodes, goes on from its newest checkpoint, and goes back into the queue before its"
    " time ends and after a\n"
    "node has failed.\n"
    "Arguments after `--` go to train.py.",
    "scalec launch slurm plans/llama3_8b.scale --time 24:00:00 -- --save-every 200",
    passes_on=True,
)
