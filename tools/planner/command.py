"""The command `plan`: the best plans of a model for a number of GPUs."""

import sys
from argparse import ArgumentParser, Namespace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ...compiler.cli.command import Command, count, file_path, plan_path
from ...compiler.cli.output import PLAN_WRONG, UsageError, put, show

if TYPE_CHECKING:
    from ...compiler.analysis.hardware import Hardware
    from . import Goal, ModelFile
    from .search import SearchResult

MARK = "Found by `scalec plan`"
"""Begins the plans that the command writes, which it overwrites."""

EXAMPLES = {"gpus": "--gpus 64", "cluster": "--cluster h100_sxm, or a file of figures"}
"""Examples of options that must be given, by name."""


def plan(options: Namespace) -> int:
    """`scalec plan`; returns the exit status."""
    from ...compiler.syntax.limits import load
    from . import ModelFile, find_plans
    from .report import as_json, print_plans

    file = ModelFile(load(options.model))
    if options.sweep:
        return _sweep(options, file)
    goal, kept = _goal(options, file), keeps(options.keep)
    folder = options.output.parent if options.output else file.folder
    result = find_plans(file, goal, kept, options.top, folder, _tell)
    if not result.table_plans:
        raise UsageError(_empty(result.result, options))
    if options.json:
        import json

        print(json.dumps(as_json(result), indent=1))
    else:
        show(print_plans(result))
    if options.output and result.text:
        put(options.output, result.text, "output", MARK, sys.stderr)
    return 0 if result.result.fitting else PLAN_WRONG


def _tell(line: str) -> None:
    """Prints a line about the search on standard error; the result may go to a file."""
    print(line, file=sys.stderr, flush=True)


def _sweep(options: Namespace, file: "ModelFile") -> int:
    """The best plans at many points: a table, or files."""
    from .sweep import DEGREES, GOALS, csv, find_points, svg
    from .sweep import MARK as DRAWN

    axes = swept_axes(options.sweep)
    for name in axes:
        if name not in (*GOALS, *DEGREES, *file.sizes):
            raise UsageError(f"--sweep has no `{name}`: {_no_axis(name, file)}")
    points = find_points(
        file,
        lambda values: _goal(Namespace(**{**vars(options), **values}), file),
        keeps(options.keep),
        axes,
        _tell,
    )
    goal, table = points[0].goal, csv(points)
    files = {"csv": (options.csv, table, table.splitlines()[0])}
    if options.svg:
        title = f"{options.model.stem}: the best plans by {' and '.join(axes)}"
        goal_values = {
            "gpus": goal.gpus,
            "global_batch": goal.global_batch,
            "seq": goal.seq,
            "cluster": goal.hardware.name,
        }
        fixed = [f"{name} {value}" for name, value in goal_values.items() if name not in axes]
        source = f"{', '.join(fixed)}; by {goal.hardware.source}"
        files["svg"] = options.svg, svg(points, title, source), DRAWN
    for form, (path, text, mark) in files.items():
        if path:
            put(path, text, form, mark, sys.stderr)
    print(table, end="")
    return 0 if any(point.best for point in points) else PLAN_WRONG


def _no_axis(name: str, file: "ModelFile") -> str:
    from ...compiler.syntax.diagnostics import did_you_mean, listing
    from .sweep import DEGREES, GOALS

    axes = (*GOALS, *DEGREES, *file.sizes)
    dims = "" if file.sizes else ", and of a file with a model alone the sizes of its dims"
    return did_you_mean(name, axes) or f"it takes {listing(axes)}{dims}"


def swept_axes(text: str) -> dict[str, list[int | str]]:
    """The values of `gpus=8..64,cluster=h100_sxm:h200`: doubled from the first to the last, or
    listed.

    Raises UsageError.
    """
    axes = dict[str, list[int | str]]()
    for part in text.split(","):
        name, _, values = part.strip().partition("=")
        low, dots, high = values.partition("..")
        words = [low, high] if dots else values.split(":")
        axes[name] = [*words] if name == "cluster" else _axis_numbers(part.strip(), words, dots)
    if len(axes) > 2:
        raise UsageError(f"--sweep has {len(axes)} axes; a picture has two")
    return axes


def _axis_numbers(part: str, words: list[str], dots: str) -> list[int | str]:
    """The numbers of an axis: its first and last one, with `dots` between them, or all."""
    if not all(word.isascii() and word.isdigit() and int(word) for word in words):
        raise UsageError(f"--sweep takes one or two of NAME=8..64 or NAME=8:16:24, not `{part}`")
    if not dots:
        return [int(word) for word in words]
    first, last = map(int, words)
    if first > last:
        raise UsageError(f"--sweep {part}: the first number is above the last")
    return [first << doublings for doublings in range(64) if first << doublings <= last]


def _goal(options: Namespace, file: "ModelFile") -> "Goal":
    from . import Goal

    for name in EXAMPLES:
        if not getattr(options, name):
            raise UsageError(f"give --{name}, as in {EXAMPLES[name]}")
    gpus = options.gpus
    path = Path(options.cluster) if options.cluster.endswith(".toml") else None
    hardware = _hardware(options.cluster, path, options.gpus_per_node)
    if gpus > hardware.ranks_per_node and gpus % hardware.ranks_per_node:
        raise UsageError(
            f"{gpus} GPUs are no whole number of nodes of {hardware.ranks_per_node}: see"
            " --gpus-per-node"
        )
    global_batch = options.global_batch or file.find_train_number("global_batch")
    seq = options.seq or file.find_train_number("seq")
    for name, size in (("global_batch", global_batch), ("seq", seq)):
        if size is None:
            raise UsageError(
                f"`{options.model}` does not say `{name}`: give --{name.replace('_', '-')}"
            )
    return Goal(gpus, hardware, global_batch or 0, seq or 0, path)


def _hardware(cluster: str, path: Path | None, per_node: int | None) -> "Hardware":
    """The hardware of a file, or of data sheets.  Raises UsageError or PlanError."""
    from attrs import evolve

    from ...compiler.analysis.hardware import find_shipped_gpu, load
    from ...compiler.config.gpus import GPUS, help_for_gpu
    from ...compiler.syntax.diagnostics import listing

    hardware = load(path) if path else find_shipped_gpu(cluster)
    if hardware is None:
        help = help_for_gpu(cluster) or f"known GPUs: {listing(GPUS)}; a file ends in .toml"
        raise UsageError(f"--cluster: there is no GPU `{cluster}`: {help}")
    return evolve(hardware, ranks_per_node=per_node or max(hardware.ranks_per_node, 1))


def keeps(text: str) -> dict[str, object]:
    """The values that `--keep tp=8,zero=3` fixes, by fields of a choice.  Raises UsageError."""
    from ...compiler.syntax.diagnostics import listing
    from .choice import RECOMPUTE
    from .space import FLAGS, SCHEDULES, VIA

    words = {
        "recompute": RECOMPUTE,
        "schedule": SCHEDULES[1:],
        "via": VIA[1:],
        **dict.fromkeys(FLAGS, ("on", "off")),
    }
    numbers = ("pp", "dp", "cp", "ep", "tp", "zero", "microbatch", "chunks", "prefetch")
    kept = dict[str, object]()
    for part in text.split(",") if text else ():
        name, _, value = part.strip().partition("=")
        if name not in (*words, *numbers):
            raise UsageError(
                f"--keep has no `{name}`; it takes {listing((*numbers, *words))}, as in --keep"
                " tp=8,zero=3"
            )
        if name in numbers and not (value.isascii() and value.isdigit()):
            raise UsageError(f"--keep sets `{name}` to `{value}`, which is not a whole number")
        if name in words and value not in words[name]:
            raise UsageError(f"--keep sets `{name}` to `{value}`; it takes {listing(words[name])}")
        if name in numbers:
            kept[name] = int(value)
        else:
            kept[name] = value == "on" if name in FLAGS else value
    return kept


def _empty(result: "SearchResult", options: Namespace) -> str:
    """Why there is no plan at all: the step of thinning that left none, or the mistake in a plan
    that was tried.
    """
    left = result.left
    if not left[0][1]:
        if not options.keep:
            return "no choices"
        return f"no choice has {options.keep}: {options.gpus} GPUs have no such degrees"
    if result.failed:
        first = result.failed[0]
        return (
            f"no plan compiles of {len(result.failed)} that were tried; {first.choice}: {first.why}"
        )
    (_, before), (step, _) = next(pair for pair in pairwise(left) if not pair[1][1])
    kept = f"; --keep {options.keep}" if options.keep else ""
    return (
        f"no plan: of {before:,} choices there is none {step}; there are {options.gpus} GPUs{kept}"
    )


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=plan_path,
        metavar="MODEL",
        help="a model (.scale), or a plan whose model is meant",
    )
    parser.add_argument("--gpus", type=count, metavar="N", help="how many GPUs there are")
    parser.add_argument(
        "--cluster", metavar="C", help="a GPU such as h100_sxm, or a file of figures (.toml)"
    )
    help = "GPUs of a node (default: those of the cluster's file, or 8)"
    parser.add_argument("--gpus-per-node", type=count, metavar="N", help=help)
    parser.add_argument(
        "--global-batch", type=count, metavar="B", help="sequences of a step (default: the plan's)"
    )
    parser.add_argument(
        "--seq", type=count, metavar="S", help="tokens of a sequence (default: the plan's)"
    )
    parser.add_argument(
        "--keep", default="", metavar="CHOICES", help="fix choices, for instance tp=8,zero=3"
    )
    parser.add_argument(
        "--top", type=count, default=5, metavar="K", help="plans to show and prove (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    help = (
        "the best plan at each of many points, as gpus=8..16384, seq=4096:8192, tp=1..8,"
        " cluster=h100_sxm:h200, or two"
        " of them"
    )
    parser.add_argument("--sweep", default="", metavar="AXES", help=help)
    parser.add_argument("--csv", type=file_path, metavar="FILE", help="write the points of a sweep")
    parser.add_argument(
        "--svg",
        type=file_path,
        metavar="FILE",
        help="write a picture of a sweep: curves, or a heat map",
    )
    help = "write the first plan, with a comment on each choice"
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=help)


COMMAND = Command(
    plan,
    _arguments,
    "Finds the plans of a model that train it fastest on a number of GPUs: degrees of all"
    " axes, microbatch,\n"
    "sharded state, recomputation, pipeline schedule.  Prints the best, compiled and proved,"
    " with their time and\n"
    "memory, why the first is as it is, each reason a comparison with another plan, and its text.\n"
    "Exits with status 1 if nothing fits.",
    "scalec plan plans/llama3_8b.scale --gpus 64 --cluster h100_sxm --global-batch 256 --seq 8192",
)
