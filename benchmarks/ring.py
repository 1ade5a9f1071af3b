"""`.venv/bin/python benchmarks/ring.py`: what of a ring's rotations is hidden behind attention.

One rank of eight, on the link of `overlap.py` in the place of its group.  A rotation takes a share of what a hop
computes, in backward of half a hop, since keys and gradients go around together.  Exposed is the part of the link's
time that the rank waits; beside it are rotations that are awaited at once.  The last rotation of gradients, home, has
nothing to hide behind, and counts apart.

Bar: at most 5% exposed where a rotation is shorter than what it runs beside.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from measure import asked_quick, in_turns, table, where
from overlap import RANKS, Link, Timeline
from torch import Tensor

from scalec.runtime.comm.mesh import Axis
from scalec.runtime.ops.ring_attention import ring_attention

POSITIONS, HEADS, KV_HEADS, WIDTH = 512, 8, 2, 64
"""Of a rank; all hops are of 512 × 512 pairs without a mask."""
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
        found = in_turns({name: _run(share, free, at_once) for name, at_once in links.items()}, 3 if quick else 9)
        for name, runs in found.items():
            shares = (f"{median(run[i] for run in runs):.0%}" for i in range(3))
            rows.append((f"{share:.0%}", name, *shares))
    table("Exposed, of the link's time", head, rows)


def _run(share: float, free: tuple[float, float], at_once: bool) -> Callable[[], tuple[float, float, float]]:
    ahead, back = (share * whole / RANKS for whole in free)

    def run() -> tuple[float, float, float]:
        """The share exposed of forward's rotations, of backward's but the last, and the last one's of all of these."""
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


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    sizes = (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(1, POSITIONS, heads, WIDTH, requires_grad=True) for heads in sizes)
    return q, k, v


if __name__ == "__main__":
    main()
