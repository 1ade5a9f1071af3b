"""All schedules that a plan can name."""

from collections.abc import Callable

from attrs import frozen

from .actions import Row, Schedule, ScheduleError, stages_of_rank
from .orders import (
    RankContext,
    breadth_first,
    dualpipe_v,
    gpipe,
    one_forward_one_backward,
    one_forward_one_backward_of_chunks,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_of_chunks,
    zero_bubble_v,
)


def loop_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """The stage_to_rank of stages that go around the ranks."""
    return tuple(range(ranks)) * chunks


def v_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """The stage_to_rank of stages that go down the ranks and back up."""
    there, back = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return ((there + back) * chunks)[: ranks * chunks]


@frozen
class ScheduleSpec:
    """A schedule that has a name."""

    row: Callable[[RankContext], Row]
    place_stages: Callable[[int, int], tuple[int, ...]] = loop_placement
    chunks: int = 1
    """How many stages a rank has where a plan does not say it."""
    variable: bool = False
    """Whether a plan may say how many stages a rank has."""

    def stage_to_rank(self, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
        """The rank of each stage; `ScheduleError` if ranks cannot have that many."""
        if chunks not in (None, self.chunks) and not self.variable:
            raise ScheduleError(
                f"a rank has {self.chunks} of its stages, not {chunks}",
                f"leave `chunks` out, or choose among {_VARIABLE}",
            )
        return self.place_stages(ranks, self.chunks if chunks is None else chunks)

    def __call__(self, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """The schedule, without messages; `ScheduleError` if it has none for these numbers."""
        stage_to_rank = self.stage_to_rank(ranks, chunks)
        rows: list[Row] = []
        for rank in range(ranks):
            stages = stages_of_rank(stage_to_rank, rank)
            rows.append(self.row(RankContext(rank, ranks, microbatches, stages)))
        return Schedule(stage_to_rank, microbatches, tuple(rows))


SCHEDULES: dict[str, ScheduleSpec] = {
    "gpipe": ScheduleSpec(gpipe),
    "1f1b": ScheduleSpec(one_forward_one_backward),
    "interleaved_1f1b": ScheduleSpec(one_forward_one_backward_of_chunks, chunks=2, variable=True),
    "breadth_first": ScheduleSpec(breadth_first, chunks=2, variable=True),
    "zb_h1": ScheduleSpec(zero_bubble_h1),
    "zb_h2": ScheduleSpec(zero_bubble_h2),
    "interleaved_zero_bubble": ScheduleSpec(zero_bubble_of_chunks, chunks=2, variable=True),
    "zbv": ScheduleSpec(zero_bubble_v, v_placement, chunks=2),
    "dualpipev": ScheduleSpec(dualpipe_v, v_placement, chunks=2),
}

_VARIABLE = ", ".join(f"`{name}`" for name, maker in SCHEDULES.items() if maker.variable)
