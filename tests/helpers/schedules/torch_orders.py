"""The orders of torch.distributed.pipelining's own schedules, without process groups or models."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as theirs

SINGLE = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
SEVERAL = {
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "breadth_first": theirs.ScheduleLoopedBFS,
    "interleaved_zero_bubble": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}
"""By our names; those of torch that have several stages on a rank."""


def stubs(ranks: int, chunks: int) -> list[Any]:
    """As much of the stages of a rank as an order is made from."""
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            submod=None,
        )
        for stage in range(chunks)
    ]


def schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Any:
    """Torch's schedule; ValueError if it has none for these numbers."""
    stages = stubs(ranks, chunks)
    return (
        SINGLE[name](stages[0], microbatches)
        if name in SINGLE
        else SEVERAL[name](stages, microbatches)
    )


def runtime(ranks: int, microbatches: int, chunks: int) -> Any:
    """Torch's executor of rows from a file."""
    return theirs._PipelineScheduleRuntime(stubs(ranks, chunks), microbatches)


def orders(table: dict[int, list[Any]]) -> list[list[str]]:
    """The rows of a table as words: without waiting and what is about weights, of overlapped
    pairs both.
    """
    return [list(_words(table[rank])) for rank in range(len(table))]


def _words(cells: Iterable[Any]) -> Iterator[str]:
    for cell in cells:
        if cell is not None and cell.sub_actions is not None:
            yield from _words(cell.sub_actions)
        elif cell is not None and cell.microbatch_index is not None:
            yield str(cell)
