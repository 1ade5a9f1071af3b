"""Comparisons that a run always makes beside its collectives, by the IR: the values that some ranks
must have alike.

Ranks compare hashes in the job's store, before or after a step or while one runs.  So these
comparisons are neither in the step's IR nor among the collectives.  `watch { copies }` compares
more, and that is in the plan.
"""

from attrs import frozen

from ..ir import BATCH, Program

EVERY_STEP = "in each of the first 4 steps, each 8th and the last"
ONCE = "before the first step and before the first save"


@frozen
class Compared:
    """Values that all ranks along the axes `over` must have alike.

    what  `windows` of the data, which make the inputs, or `state`: masters and optimizer state of
          the parameters `of`
    """

    what: str
    over: tuple[str, ...]
    when: str
    param_names: tuple[str, ...] = ()


def find_comparisons(program: Program) -> list[Compared]:
    """All comparisons, of axes longer than one rank.

    With several nodes, ranks also read windows of the node before.
    """
    axes = [axis.name for axis in program.axes if axis.size > 1]
    if not axes:
        return []
    batch_axes = set[str]()
    for arg in program.microbatches.args:
        batch_axes.update(arg.value.type.axes_of(BATCH))
    over_windows = tuple(axis for axis in axes if axis not in batch_axes)
    comparisons = [Compared("windows", over_windows, EVERY_STEP)]
    params: dict[tuple[str, ...], list[str]] = {}
    for param in program.params_and_buffers:
        params.setdefault(_holders(program, param.name, axes), []).append(param.name)
    for over, names in params.items():
        if over:
            comparisons.append(Compared("state", over, ONCE, tuple(names)))
    return comparisons


def _holders(program: Program, param: str, axes: list[str]) -> tuple[str, ...]:
    """The axes along which ranks keep the same of a parameter between steps; a stage of a
    pipeline has its own.
    """
    type = program.types[param]
    apart = set[str]()
    for dim in type.dims:
        apart.update(type.axes_of(dim))
    for bucket in program.buckets:
        if param in bucket.params:
            apart.update(bucket.shard_axes)
    if program.pipeline:
        apart.add(program.pipeline.axis)
    return tuple(axis for axis in axes if axis not in apart)
