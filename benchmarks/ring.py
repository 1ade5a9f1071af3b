"""`.venv/bin/python benchmarks/ring.py`: what of a ring's rotations is hidden behind attention, and
what that takes.

One rank of eight, on the link of `overlap.py` in the place of its group.  A rotation takes a share
of what a hop computes, in backward of half a hop, since keys and gradients go around together.
Exposed is the part of the link's time that the rank waits; beside it are rotations that are awaited
at once.  The last rotation of gradients, home, has nothing to hide behind, and counts apart.

Bar: at most 5% exposed where a rotation is shorter than what it runs beside.

A causal zigzag's forward and backward, by torch's flash attention and by plain torch: the latter
does the calls where there are documents, of which one here has the whole sequence.  Memory is
beside operands, with their gradients.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from measure import asked_quick, in_turns, table, where
from overlap import RANKS, Link, Timeline
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from scalec.runtime.comm.mesh import Axis
from scalec.runtime.ops.ring_attention import ring_attention

POSITIONS, HEADS, KV_HEADS, WIDTH = 512, 8, 2, 64
"""Positions of a rank; all hops are of 512 × 512 pairs without a mask."""
SHARES = (0.5, 0.8, 1.2)


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    print(f"{where()}, one thread")
    ways = [_timed(Link(0.0, float("inf"))) for _ in range(3)]
    free = min(ahead for ahead, _ in ways), min(back for _, back in ways)
    head = ("a rotation, of a hop", "", "forward", "backward", "home, of all")
    rows: list[tuple[str, ...]] = []
    for share in SHARES[1:2] if quick else SHARES:
        links = {"overlapped": False, "at once": True}
        found = in_turns(
            {name: _run(share, free, at_once) for name, at_once in links.items()}, 3 if quick else 9
        )
        for name, runs in found.items():
            shares = (f"{median(run[i] for run in runs):.0%}" for i in range(3))
            rows.append((f"{share:.0%}", name, *shares))
    table("Exposed, of the link's time", head, rows)
    head = ("positions of a rank", "q, k, v", "flash", "plain", "memory, flash", "memory, plain")
    sizes = [512] if quick else [512, 2048]
    rows = [_calls(size, dtype) for size in sizes for dtype in (torch.float32, torch.bfloat16)]
    table("Forward and backward of a causal zigzag", head, rows)


def _run(
    share: float, free: tuple[float, float], at_once: bool
) -> Callable[[], tuple[float, float, float]]:
    ahead, back = (share * whole / RANKS for whole in free)

    def run() -> tuple[float, float, float]:
        """The share exposed of forward's rotations, of backward's but the last, and the last
        one's of all of these.
        """
        q, k, v = _operands()
        link = Link(ahead, float("inf"), at_once)
        out = ring_attention(q, k, v, Axis("cp", RANKS, 3, link), causal=False)
        forward, link.timeline, link.latency = link.timeline, Timeline(), back / 2
        out.sum().backward()
        backward = link.timeline
        home = backward.collectives.pop()
        whole = home.link.length + sum(each.link.length for each in backward.collectives)
        last = sum(home.link.shared(wait) for wait in backward.waits) / whole
        return forward.exposed(of_layers=False), backward.exposed(of_layers=False), last

    return run


def _timed(link: Link) -> tuple[float, float]:
    """Seconds of forward and of backward, without a link's."""
    q, k, v = _operands()
    begun = perf_counter()
    out = ring_attention(q, k, v, Axis("cp", RANKS, 3, link), causal=False)
    between = perf_counter()
    out.sum().backward()
    return between - begun, perf_counter() - between


def _calls(positions: int, dtype: torch.dtype) -> tuple[str, ...]:
    """A row: milliseconds and MiB of each way."""

    def step(documents: Tensor | None) -> float:
        given, axis = _operands(positions, dtype), Axis("cp", RANKS, 3, Link(0.0, float("inf")))
        begun = perf_counter()
        ring_attention(*given, axis, documents=documents, zigzag=True).sum().backward()
        return perf_counter() - begun

    def peak(documents: Tensor | None) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            step(documents)
        events = cast(Any, found.profiler).kineto_results.events()
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        )
        return max(accumulate(size for _, size in changes)) - sum(
            it.nbytes for it in _operands(positions, dtype)
        )

    ways = {"flash": None, "plain": torch.zeros(1, positions * RANKS, dtype=torch.int64)}
    times = in_turns({name: partial(step, documents) for name, documents in ways.items()}, 5)
    spans = (f"{median(runs) * 1e3:,.0f} ms" for runs in times.values())
    return (
        f"{positions:,}",
        str(dtype).removeprefix("torch."),
        *spans,
        *(f"{peak(it) / 2**20:.1f} MiB" for it in ways.values()),
    )


def _operands(
    positions: int = POSITIONS, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (
        torch.randn(1, positions, heads, WIDTH, dtype=dtype, requires_grad=True) for heads in sizes
    )
    return q, k, v


if __name__ == "__main__":
    main()
