"""State that is shared out layer by layer: the plain model's update in every way to share, and
after failed passes.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal, get_args

import pytest
import torch
import torch.distributed as dist

from helpers.forked_ranks import run_ranks
from helpers.late_process_group import Link
from helpers.layered_model import (
    F64,
    LAYERS,
    WAYS,
    ZERO,
    Dtypes,
    Way,
    data,
    furthest,
    plain,
    shared,
)
from scalec.runtime import SGD, AdamW, Mesh
from scalec.runtime.state.shards import Extent, fault

pytestmark = pytest.mark.usefixtures("calls_uncompared")


def _compared(
    way: Way, microbatches: int, dtypes: Dtypes, optimizer: AdamW | SGD, mesh: Mesh, link: Link
) -> list[float]:
    """How far three steps, one of them skipped, are from the plain model's: state, norms, and
    evaluations between.
    """
    ours, theirs = shared(way, mesh, optimizer, dtypes, link.late), plain(way, optimizer, dtypes)
    found: list[float] = []
    for run in (ours, theirs):
        run.state.initialise(seed=2)
    for step in range(3):
        batches = [data(step, rank, microbatches) for rank in range(dist.get_world_size())]
        skip = step == 1
        norm = ours.train_step(batches[dist.get_rank()], skip)
        want = theirs.train_step([microbatch for batch in batches for microbatch in batch], skip)
        found += [float(norm / want - 1), furthest(ours, theirs)]
        tokens, _ = data(step, rank=99, microbatches=1)[0]
        found.append(float(ours.eval_step(tokens) / theirs.eval_step(tokens) - 1))
    assert not link.under_way
    return found


def _each(
    ways: list[Way],
    dtypes: Dtypes,
    optimizer: AdamW | SGD,
    axes: dict[str, int],
    of: tuple[int, ...] = (1, 3),
) -> dict[str, float]:
    """The largest difference by way and number of microbatches."""
    found: dict[str, float] = {}
    link, mesh = Link(), Mesh(axes)
    link.poison()
    for way, microbatches in product(ways, of):
        differences = _compared(way, microbatches, dtypes, optimizer, mesh, link)
        found[f"{way}, {microbatches} microbatches"] = max(
            map(abs, differences), key=lambda it: (it != it, it)
        )
    return found


def _assert_close(world: int, tolerance: float, *args: object) -> None:
    for rank in run_ranks(world, _each, *args):
        assert not {case: value for case, value in rank.items() if not value < tolerance}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_update_is_that_of_the_plain_model(way: Way) -> None:
    ways = [
        replace(way, nested=nested, again=again)
        for nested, again in product((False, True), repeat=2)
    ]
    _assert_close(2, 1e-12, ways, F64, AdamW(), {"dp": 2, "replica": 1})


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("axes", [{"dp": 4, "replica": 1}, {"replica": 2, "dp": 2}], ids=str)
def test_on_four_ranks_too_and_where_two_hold_the_same_part(axes: dict[str, int], way: Way) -> None:
    """Groups alone differ from two ranks, where each way is also tried with one microbatch."""
    _assert_close(
        4,
        1e-12,
        [replace(way, nested=True, again=True)],
        F64,
        AdamW(),
        {"dp": 1, "replica": 1} | axes,
        (3,),
    )


def test_on_one_rank_nothing_moves() -> None:
    _assert_close(
        1, 1e-12, [replace(way, nested=True) for way in WAYS], F64, AdamW(), {"dp": 1, "replica": 1}
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("master", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
def test_masters_of_working_copies_too(master: torch.dtype, tolerance: float) -> None:
    _assert_close(2, tolerance, WAYS, (torch.bfloat16, master), SGD(0.9), {"dp": 2, "replica": 1})


@pytest.mark.sample(1)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_however_far_ahead_gathers_are(prefetch: int) -> None:
    ways = [replace(ZERO[3], prefetch=prefetch, nested=nested) for nested in (False, True)]
    _assert_close(2, 1e-12, ways, F64, AdamW(), {"dp": 2, "replica": 1})


def _extents(way: Way) -> list[tuple[str, tuple[int, ...], Extent]]:
    """What this rank writes of parameters to a checkpoint."""
    run = shared(way, Mesh({"dp": 3, "replica": 1}), AdamW(), F64)
    return [
        (box.key, box.shape, box.extent)
        for box in run.boxes().values()
        if box.is_own and "/" not in box.key
    ]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_element_of_a_turn_is_written_by_one_rank(way: Way) -> None:
    found: dict[tuple[str, tuple[int, ...]], list[Extent]] = {}
    for key, shape, extent in (each for rank in run_ranks(3, _extents, way) for each in rank):
        found.setdefault((key, shape), []).append(extent)
    assert len(found) == 2 + 3 * LAYERS
    assert not {
        key: text for (key, shape), extents in found.items() if (text := fault(shape, extents))
    }


# ---- passes that are not finished


class _BadDay(Exception):
    pass


Where = Literal["forward", "backward", "the end of a layer's backward"]


def _abandoned(way: Way, where: Where) -> float:
    """How far a step is from the plain model's, after one that raised there, in the second
    layer.
    """
    link, calls = Link(), dict.fromkeys(get_args(Where), 0)
    link.poison()

    def raises(here: Where) -> None:
        calls[here] += 1
        if here == where and calls[here] == 2:
            raise _BadDay

    def begins() -> None:
        raises("forward" if calls["forward"] < LAYERS else "backward")

    mesh, ends = Mesh({"dp": 2, "replica": 1}), partial(raises, "the end of a layer's backward")
    ours, theirs = (
        shared(way, mesh, AdamW(), F64, link.late, begins, ends),
        plain(way, AdamW(), F64),
    )
    ours.state.initialise(seed=1)
    batches = [data(0, rank, 2) for rank in range(2)]
    with pytest.raises(_BadDay):
        ours.train_step(batches[dist.get_rank()])
    ours.state.zero()
    for run in (ours, theirs):
        run.state.initialise(seed=2)  # what was gathered before is of no use
    ours.train_step(batches[dist.get_rank()])
    theirs.train_step([*batches[0], *batches[1]])
    assert not link.under_way
    return furthest(ours, theirs)


@pytest.mark.sample(8)
@pytest.mark.parametrize("where", get_args(Where))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_after_one_that_raised_is_right(way: Way, where: Where) -> None:
    assert max(run_ranks(2, _abandoned, way, where)) < 1e-12


def _unused() -> None:
    """A step of fewer backwards than was said."""
    ours = shared(ZERO[1], Mesh({"dp": 2, "replica": 1}), AdamW(), F64)
    ours.model(*data(0, 0, 1)[0], ours.begin(2)).backward()
    ours.state.gradients()


def test_gradients_that_backward_has_not_reduced_are_no_gradients() -> None:
    with pytest.raises(pytest.fail.Exception, match="backward has not come by every layer"):
        run_ranks(2, _unused)
