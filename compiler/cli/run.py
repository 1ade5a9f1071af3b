"""The command `run`: one line that starts a plan's program on this machine, and goes on with
its run.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from .command import Command, count, need, output_arguments, plan_argument, torchrun
from .output import TEXT, UsageError

if TYPE_CHECKING:
    from ..reports.summary import Launch

_CHOSEN = {"--resume", "--resume-anyway", "--export"}
"""Options of train.py that themselves name the checkpoint to go on with."""


_HELP = {"-h", "--help"}

PLACES = ("tensorboard", "wandb")
"""Values of `train.py --log-to`: the packages that it needs."""


def run(options: Namespace) -> None:
    """`scalec run`."""
    from ..reports.summary import get_launch
    from .compile import load_model, write_program
    from .op_trials import trials

    words = _words(options.rest, options.anew, options.max_restarts)
    _check_places(options.rest)
    if _HELP & {*options.rest}:
        _show_help(options.plan)
        return
    is_compiled = options.plan.suffix == ".py"
    with trials(options.plan, options.try_functions and not is_compiled) as trial:
        plan = None
        if is_compiled:
            how = _launch_of_script(options.plan)
        else:
            plan = load_model(options.plan)
            how = get_launch(plan[1])
        if how.nodes > 1:
            raise UsageError(_several_nodes(options.plan, how.nodes))
        need("torch", "training")
        script = write_program(*plan, options, trial) if plan else options.plan
    processes = "process" if how.ranks_per_node == 1 else "processes"
    print(f"starting {how.ranks_per_node} {processes}: Python and torch take some seconds to load")
    restarts = [f"--max-restarts={options.max_restarts}"] if options.max_restarts else []
    torchrun([*how.options(), *restarts, str(script), *words], how.ranks_per_node)


def _check_places(arguments: Sequence[str]) -> None:
    """UsageError where the run is to write to a place whose package is not installed.

    It comes before anything is compiled.
    """
    from importlib.util import find_spec

    if "--log-to" not in arguments:
        return
    words = arguments[arguments.index("--log-to") + 1 :]
    for place in takewhile(PLACES.__contains__, words):
        if find_spec(place) is None:
            raise UsageError(
                f"--log-to {place} needs the package {place}: pip install 'scalec[{place}]'"
            )


def _show_help(plan: Path) -> None:
    """Starts train.py to print its options, in one process; compiles a plan for that."""
    import subprocess
    from tempfile import TemporaryDirectory

    from .compile import load, write

    need("torch", "training")
    with TemporaryDirectory() as folder:
        script = plan
        if plan.suffix != ".py":
            script = Path(folder, "train.py")
            write(load(plan), None, Path(folder))
        sys.stdout.flush()
        subprocess.run([sys.executable, str(script), "--help"], check=False)


def _several_nodes(plan: Path, nodes: int) -> str:
    job = f"`scalec launch slurm {plan}` writes the job for Slurm (`k8s` for Kubernetes)"
    return (
        f"this plan runs on {nodes} nodes: {job}; `scalec compile` prints the torchrun command"
        " for each node"
    )


def _words(arguments: Sequence[str], anew: bool, restarts: int) -> list[str]:
    """The words for train.py, which goes on with its run unless the user says otherwise.

    Raises UsageError.
    """
    if anew and restarts:
        raise UsageError(
            "each restart would begin anew: --anew and --max-restarts do not go together"
        )
    chosen = anew or not _CHOSEN.isdisjoint(word.partition("=")[0] for word in arguments)
    return [*arguments] if chosen else ["--resume", "auto", *arguments]


def _launch_of_script(script: Path) -> "Launch":
    """How a compiled program is started, by the plan.json beside it.  Raises UsageError."""
    import json
    from math import prod
    from typing import Any

    from ..reports.summary import Launch

    account = script.with_name("plan.json")
    if not script.is_file():
        raise UsageError(f"there is no `{script}`: `scalec compile` writes it")
    try:
        content: dict[str, Any] = json.loads(account.read_bytes())
        nodes = int(content["settings"]["cluster"]["nodes"])
        return Launch(nodes, prod(content["mesh"].values()) // nodes, nodes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f"`{account}`, which `scalec compile` writes beside train.py, cannot be read"
        ) from None


def _arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    output_arguments(parser)
    parser.set_defaults(format=TEXT)
    parser.usage = (
        "scalec run [-h] [-o DIR] [--no-verify] [--no-cache] [--no-try] [--max-restarts N]"
        " [--anew] PLAN|train.py"
    )
    parser.usage += " [-- ARGUMENT ...]"
    help = (
        "how often all ranks start anew, from the newest checkpoint, after one has failed"
        " (default: 0)"
    )
    parser.add_argument("--max-restarts", type=count, default=0, metavar="N", help=help)
    help = (
        "begin, though there is a checkpoint: an earlier run's files are moved into a folder"
        " beside it"
    )
    parser.add_argument("--anew", action="store_true", help=help)


COMMAND = Command(
    run,
    _arguments,
    "Compiles a plan as `scalec compile` does, or takes a compiled train.py, and starts it"
    " with torchrun, one\n"
    "process per rank of its mesh.  The run goes on from its newest checkpoint, if there is"
    " one: the same line\n"
    "starts it and takes it further, and ends at once where it has finished.\n"
    "Arguments after `--` go to train.py; `-- --help` lists them.  Exit status 75 where"
    " SIGTERM or SIGUSR1 has\n"
    "ended the run after a save, 130 where Ctrl-C has.",
    "scalec run plans/tiny_llama.scale -- --steps 100 --lr 1e-3",
    passes_on=True,
)
