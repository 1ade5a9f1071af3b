"""The sections of settings, each by itself and all together; what replaces sections that cannot be
read.
"""

from collections.abc import Mapping, Sequence
from math import prod

from attrs import evolve, frozen

from ..config.fields import fields_of
from ..config.gpus import check_gpu, kernels_for
from ..config.schema import parse_section
from ..config.settings import (
    AUTO,
    ON,
    STDLIB,
    Cluster,
    Data,
    Flow,
    Optimizer,
    Pipelining,
    Train,
    Watch,
)
from ..ir import ITEM_BYTES, PRECISIONS, Axis
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, wrong
from .data_files import check_files
from .pipeline import check_file
from .sharding import get_flow


@frozen
class Sections:
    """The settings of each section; `train` is None where it cannot be read, other sections are
    then as if they were not there.
    """

    train: Train | None
    cluster: Cluster
    flow: Flow
    watch: Watch
    pipeline: Pipelining | None


def get_settings(
    plan_sections: Mapping[str, tree.Section],
    sections: Mapping[str, tree.Section],
    diagnostics: Diagnostics,
) -> Sections:
    """The settings of the plan's own sections.

    `sections` has an empty section in the place of each that is not among `plan_sections`.
    """
    cluster = None
    if "cluster" in plan_sections:
        cluster = parse_section(Cluster, sections["cluster"], diagnostics)
    train = _train(sections["train"], cluster or Cluster(), diagnostics)
    if cluster:
        check_gpu(cluster, diagnostics)
    if cluster and cluster.hardware:
        from ..analysis.hardware import check_hardware

        check_hardware(cluster, diagnostics)
    pipeline = None
    if "pipeline" in plan_sections:
        pipeline = parse_section(Pipelining, plan_sections["pipeline"], diagnostics, check_file)
    flow = get_flow(sections["state"], diagnostics)
    watch = parse_section(Watch, sections["watch"], diagnostics, _check_skips)
    if not train:
        pipeline = None
    return Sections(train, cluster or Cluster(), flow or Flow(), watch or Watch(), pipeline)


def _train(section: tree.Section, cluster: Cluster, diagnostics: Diagnostics) -> Train | None:
    train = parse_section(
        Train, section, diagnostics, element_types, check_compiled, check_rates, check_sets
    )
    if train:
        check_files(section, train.data, diagnostics)
    with diagnostics.catch():
        return train and evolve(train, kernels=kernels_for(train, cluster))
    return None


def _check_skips(watch: Watch) -> None:
    """A rule that skips steps says how many, and each skipped step is reported."""
    if watch.skips and watch.finite > 1:
        help = "leave `finite` out: a look takes some microseconds of the host"
        raise wrong(
            "E0405",
            "`skips` needs a look at each step: `finite every 1`",
            watch.spans["finite"],
            help=help,
        )
    if watch.get_loss_limit and not watch.skips:
        help = "add `skips = 3`: as many steps in a row may be skipped, and one more ends the run"
        raise wrong("E0402", "`spikes = skip(…)` needs `skips`", watch.spans["spikes"], help=help)


def stand_in_train(section: tree.Section, axes: Sequence[Axis]) -> Train:
    """Settings to look for mistakes of sharding with where the section cannot be read: axes divide
    their dims.

    The sequence divides into two chunks a rank, too.
    """
    ranks = prod(axis.size for axis in axes)
    spans = {field.name: section.head for field in fields_of(Train)}
    return Train(
        2 * ranks, ranks, 1, 1, Optimizer("sgd", 1.0), Data("text", (STDLIB,)), spans=spans
    )


def element_types(train: Train) -> tuple[str, str]:
    """Element types of activations and of parameters' state of record.

    Raises PlanError where settings contradict each other.
    """
    diagnostics = Diagnostics()
    master = train.master or ("fp64" if train.precision == "fp64" else "fp32")
    if master != train.precision and _bytes(master) <= _bytes(train.precision):
        diagnostics.error(
            "E0411",
            f"masters of {master} are less precise than the {train.precision} in which the"
            " model computes",
            train.spans["master"],
            help=f"leave `master` out, or compute in `precision = {master}`",
        )
    if train.reduce and train.reduce != master and _bytes(train.reduce) >= _bytes(master):
        diagnostics.error(
            "E0411",
            f"sums in {train.reduce} are no more precise than the {master} in which gradients"
            " are added up",
            train.spans["reduce"],
            help="leave `reduce` out",
        )
    elif train.reduce == "fp16" and train.precision != "fp16":
        diagnostics.error(
            "E0411",
            "without a loss scale gradients are too small for sums in fp16",
            train.spans["reduce"],
            help="write `reduce = bf16`, which takes as many bytes, or `precision = fp16`,"
            " which has a loss scale",
        )
    diagnostics.check()
    return PRECISIONS[train.precision], PRECISIONS[master]


def _bytes(precision: str) -> int:
    return ITEM_BYTES[PRECISIONS[precision]]


def check_compiled(train: Train) -> None:
    """Raises PlanError where parts of a layer are to be recomputed, and layers to be compiled."""
    diagnostics = Diagnostics()
    if train.compile == ON:
        compile_note = Note(train.spans["compile"], "layers are compiled")
        if train.recompute.word in ("selective", AUTO):
            diagnostics.error(
                "E0412",
                "torch.compile itself chooses what to recompute in a layer",
                train.spans["recompute"],
                notes=[compile_note],
                help="write `recompute = full` or `every(2, layers)` for whole layers, or leave"
                " `compile` out",
            )
        if train.gathered == "regather":
            diagnostics.error(
                "E0412",
                "a compiled layer saves its gathered activations",
                train.spans["gathered"],
                notes=[compile_note],
                help="write `recompute = full`, which also regathers in backward, or leave"
                " `compile` out",
            )
    diagnostics.check()


def check_rates(train: Train) -> None:
    """Raises PlanError where a schedule would fall to more than it begins with."""
    optimizer, schedule = train.optimizer, train.optimizer.schedule
    if schedule.floor > optimizer.lr:
        message = f"the learning rate falls to {schedule.floor:g}, from {optimizer.lr:g}"
        notes = (Note(optimizer.spans["lr"], "the peak"),)
        help = "`floor` is the learning rate at the last step, not a fraction of `lr`"
        raise wrong(
            "E0416", message, schedule.spans["floor"], "more than the peak", help, notes=notes
        )


def check_sets(train: Train) -> None:
    """Raises PlanError where data has no files, or files beside sets, or a set that is all but
    never seen.
    """
    data, title = train.data, f"data {train.data.kind}"
    if not data.sets and data.files is None:
        help = (
            'write `files = ["corpus/*.txt"]`, or `set NAME { files = …  weight = … }` for'
            " each of several sets"
        )
        raise wrong("E0402", f"`{title}` needs `files`", data.spans["files"], help=help)
    if data.sets and data.files is not None:
        notes = (Note(data.sets[0].spans["name"], "a set"),)
        help = "make them a set too: `set NAME { files = … }`"
        raise wrong(
            "E0406",
            f"`{title}` has files beside its sets",
            data.spans["files"],
            help=help,
            notes=notes,
        )
    whole = sum(data_set.weight for data_set in data.sets)
    for data_set in data.sets:
        if data_set.weight * LEAST_SHARE < whole:
            message = f"`{data_set.name}` is less than one in {LEAST_SHARE:,} sequences"
            help = "leave the set out, or raise its `weight`"
            raise wrong(
                "E0405",
                message,
                data_set.spans["weight"],
                "weights are kept to that part of their sum",
                help,
            )


LEAST_SHARE = 10_000
"""A set of data is at least one sequence of this many."""
