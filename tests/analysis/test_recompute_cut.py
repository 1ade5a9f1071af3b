"""Minimum cuts of what is recomputed against all subsets of small bodies."""

from itertools import chain, combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scalec.compiler.analysis.recompute_cut import Choice, Choices, frontier, least

MOST_OPS = 6


@st.composite
def bodies(draw: st.DrawFn) -> Choices:
    """Ops that read what a layer is handed or what others make, some of which backward cannot
    recompute.
    """
    known, ops = ["x"], list[Choice]()
    for i in range(draw(st.integers(1, MOST_OPS))):
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
        makes = [f"v{i}{part}" for part in ("", "b")[: draw(st.integers(1, 2))]]
        time = draw(st.none() | st.integers(1, 20).map(float))
        ops.append(
            Choice(makes[0], "op", tuple(reads), tuple(makes), draw(st.integers(0, 3)), time)
        )
        known += makes
    sizes = {name: draw(st.integers(0, 20)) for name in known}
    return Choices(
        tuple(ops), sizes, frozenset(draw(st.lists(st.sampled_from(known), unique=True)))
    )


def _all(body: Choices) -> list[tuple[float, int]]:
    """The time and the bytes of each subset, by what backward needs one after the other."""
    able = [op for op in body.ops if op.time is not None]
    subsets = chain.from_iterable(combinations(able, size) for size in range(len(able) + 1))
    return [_one(body, {op.name for op in again}) for again in subsets]


def _one(body: Choices, again: set[str]) -> tuple[float, int]:
    maker = {storage: op for op in body.ops for storage in op.makes}
    kept, asked = (
        set[str](),
        [*body.needed, *(it for op in body.ops if op.name in again for it in op.reads)],
    )
    while asked:
        storage = asked.pop()
        op = maker.get(storage)
        if op is None or op.name not in again:
            kept.add(storage)
    others = sum(op.keeps for op in body.ops if op.name not in again)
    time = sum(op.time or 0 for op in body.ops if op.name in again)
    return time, sum(body.sizes[storage] for storage in kept) + others


@settings(max_examples=25, deadline=None)
@given(bodies(), st.integers(0, 60))
def test_a_cut_of_least_time_is_that_of_all_subsets(body: Choices, most: int) -> None:
    found = least(body, most, frontier(body))
    within = [time for time, kept in _all(body) if kept <= most]
    if found is None:
        assert not within
    else:
        assert (found.time, found.bytes) == _one(body, {*found.names})
        assert found.bytes <= most
        assert found.time == min(within)


@settings(max_examples=25, deadline=None)
@given(bodies())
def test_the_frontier_is_the_lower_hull_of_all_subsets(body: Choices) -> None:
    found, known = frontier(body), _all(body)
    times, kept = [cut.time for cut in found], [cut.bytes for cut in found]
    assert times == sorted(times)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == min(size for _, size in known)
    for first, last in pairwise(found):
        price = (last.time - first.time) / (first.bytes - last.bytes)
        assert all(
            time + price * size >= first.time + price * first.bytes - 1e-6 for time, size in known
        )


@settings(max_examples=15, deadline=None)
@given(bodies(), st.integers(0, 60), st.integers(0, 60))
def test_more_memory_never_takes_more_time(body: Choices, most: int, more: int) -> None:
    known = frontier(body)
    few, many = least(body, most, known), least(body, most + more, known)
    assert few is None or (many is not None and many.time <= few.time)
