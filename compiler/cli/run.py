"""The command `run`: one line that starts a plan's program on this machine, and goes on with its run."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .command import Command, count, need, output_arguments, plan_argument, torchrun
from .output import UsageError

if TYPE_CHECKING:
    from ..reports.summary import Launch

_CHOSEN = {"--resume", "--resume-anyway", "--export"}
"""Options of train.py that say themselves what to go on with."""


def run(options: Namespace) -> NoReturn:
    """`scalec run`."""
    from ..reports.summary import launch
    from .compile import load, written
    from .op_trials import trials

    words = _words(options.rest, options.anew, options.max_restarts)
    is_compiled = options.plan.suffix == ".py"
    with trials(options.plan, options.try_functions and not is_compiled) as trial:
        plan = None if is_compiled else load(options.plan)
        how = launch(plan.program) if plan else _compiled(options.plan)
        if how.nodes > 1:
            raise UsageError(_several_nodes(options.plan, how.nodes))
        need("torch", "training")
        script = written(plan, options, trial) if plan else options.plan
    restarts = [f"--max-restarts={options.max_restarts}"] if options.max_restarts else []
    torchrun([*how.options(), *restarts, str(script), *words], how.ranks_per_node)


def _several_nodes(plan: Path, nodes: int) -> str:
    job = f"`scalec launch slurm {plan}` writes the job for Slurm (`k8s` for Kubernetes)"
    return f"this plan runs on {nodes} nodes: {job}; `scalec compile` prints the torchrun command for each node"


def _words(rest: Sequence[str], anew: bool, restarts: int) -> list[str]:
    """The words for train.py, which goes on with its run unless it is told otherwise.  Raises UsageError."""
    if anew and restarts:
        raise UsageError("each restart would begin anew: --anew and --max-restarts do not go together")
    chosen = anew or not _CHOSEN.isdisjoint(word.partition("=")[0] for word in rest)
    return [*rest] if chosen else ["--resume", "auto", *rest]


def _compiled(script: Path) -> "Launch":
    """How a compiled program is started, by the plan.json beside it.  Raises UsageError."""
    import json
    from math import prod
    from typing import Any

    from ..reports.summary import Launch

    account = script.with_name("plan.json")
    if not script.is_file():
        raise UsageError(f"there is no `{script}`: `scalec compile` writes it")
    try:
        said: dict[str, Any] = json.loads(account.read_bytes())
        nodes = int(said["settings"]["cluster"]["nodes"])
        return Launch(nodes, prod(said["mesh"].values()) // nodes, nodes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"`{account}`, which `scalec compile` writes beside train.py, cannot be read") from None


def _arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    output_arguments(parser)
    parser.usage = "scalec run [-h] [-o DIR] [--no-verify] [--no-try] [--max-restarts N] [--anew] PLAN|train.py"
    parser.usage += " [-- ARGUMENT ...]"
    help = "how often all ranks start anew, from the newest checkpoint, after one has failed (default: 0)"
    parser.add_argument("--max-restarts", type=count, default=0, metavar="N", help=help)
    help = "begin, though there is a checkpoint: an earlier run's files are moved into a folder beside it"
    parser.add_argument("--anew", action="store_true", help=help)


COMMAND = Command(
    "run",
    run,
    _arguments,
    "compile a plan and train it on this machine, or go on with its run",
    "Compiles a plan as `scalec compile` does, or takes a compiled train.py, and starts it with torchrun, one\n"
    "process per rank of its mesh.  The run goes on from its newest checkpoint, if there is one: the same line\n"
    "starts it and takes it further, and ends at once where it has finished.\n"
    "Arguments after `--` go to train.py; `-- --help` lists them.  Exit status 75 where SIGTERM or SIGUSR1 has\n"
    "ended the run after a save, 130 where Ctrl-C has.",
    "scalec run plans/tiny_llama.scale -- --steps 100 --lr 1e-3",
    passes_on=True,
)
