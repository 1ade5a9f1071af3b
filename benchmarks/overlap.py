"""`.venv/bin/python benchmarks/overlap.py`: what of communication is hidden behind forward and
backward.

One rank of eight.  In the place of its group stands a link of adjustable latency: it performs one
collective after another, each latency + bytes / bandwidth after it could begin, while the rank
computes; peers are absent, and their parts are copies of this rank's own.  A step's timeline is
recorded: when each collective begins, when it is done, how long the program waits for it, when
forward and backward begin and end.

Bar: the first reduction begins before backward ends, the last gather of forward before forward
does.  Exposed is the part of the link's time that the program waits; beside it stands the same step
with every collective awaited at once.  Parameters outside of layers are moved in sight, so that
their collectives, and those of scalars, are exposed always.

Non-goals: no two ranks in turn, no host of the collectives' own: a real one takes cores or memory
bandwidth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from time import perf_counter, sleep
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from emitted import Sizes, batch, program, random_rows
from measure import asked_quick, in_turns, table, where
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalec.runtime import Mesh
from scalec.runtime.comm.mesh import Axis

RANKS = 8
AXES = {"dp": RANKS, "tp": 1}
SIZES = Sizes(hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=768, layers=8, seq=128, rows=2)
OF_A_LAYER = 1 << 20  # bytes: a layer has more than this, everything else together less
STATES = {
    "zero 0": "zero 0 over dp  bucket = 4MiB",
    "zero 1": "zero 1 over dp  bucket = 4MiB",
    "zero 2": "zero 2 over dp",
    "zero 3": "zero 3 over dp",
    "zero 3, prefetch 0": "zero 3 over dp  prefetch = 0",
}
LATENCIES = (1e-3, 4e-3, 16e-3)
DRAWN = LATENCIES[1]
BANDWIDTH = 2e9  # bytes a second
WIDTH = 100  # columns of a drawn timeline


@dataclass
class Span:
    """From when to when."""

    start: float = 0.0
    stop: float = 0.0

    @property
    def length(self) -> float:
        return self.stop - self.start

    def shared(self, other: "Span") -> float:
        """The length of what both have."""
        return max(0.0, min(self.stop, other.stop) - max(self.start, other.start))


@dataclass
class Collective:
    """When the program began it, when the link was at it, and when the program last waited for
    it.
    """

    kind: str
    size: int  # bytes of the whole
    begun: float
    link: Span
    awaited: float = 0.0

    @property
    def is_of_a_layer(self) -> bool:
        return self.size > OF_A_LAYER


@dataclass
class Timeline:
    """Figures of one step."""

    step: Span = field(default_factory=Span)
    forward: Span = field(default_factory=Span)
    backward: Span = field(default_factory=Span)
    collectives: list[Collective] = field(default_factory=list[Collective])
    waits: list[Span] = field(default_factory=list[Span])

    def first_reduction(self) -> float:
        """Seconds from its beginning to the end of backward."""
        return self.backward.stop - min(
            each.begun for each in self._of("reduce") if each.begun > self.backward.start
        )

    def last_gather(self) -> float | None:
        """Seconds from its beginning to the end of forward, if forward needs one."""
        begun = [each.begun for each in self._of("gather") if each.begun < self.backward.start]
        return self.forward.stop - max(begun) if begun else None

    def _of(self, kind: str) -> list[Collective]:
        return [each for each in self.collectives if each.kind == kind and each.is_of_a_layer]

    def exposed(self, of_layers: bool) -> float:
        """The part of the link's time, for layers or for anything, that the program waits,
        whatever it waits for.
        """
        links = [each.link for each in self.collectives if each.is_of_a_layer or not of_layers]
        return sum(link.shared(wait) for link in links for wait in self.waits) / sum(
            link.length for link in links
        )


class Link:
    """In the place of a process group, which a program asks for no more than this."""

    def __init__(self, latency: float, bandwidth: float, at_once: bool = False) -> None:
        self.timeline = Timeline()
        self.latency, self._bandwidth, self._at_once = latency, bandwidth, at_once
        self._free = 0.0  # when it is done with all that was begun

    def _allgather_base(self, whole: Tensor, part: Tensor, *_: Any) -> "Work":
        for each in whole.chunk(RANKS):
            each.copy_(part)
        return self._begin("gather", whole, trips=1)

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, *_: Any) -> "Work":
        return self._begin("reduce", whole, trips=1)

    def alltoall_base(self, out: Tensor, whole: Tensor, *_: Any) -> "Work":
        out.copy_(whole)
        return self._begin("rotate", whole, trips=1)

    def allreduce(self, tensors: list[Tensor], *_: Any) -> "Work":
        return self._begin("reduce", tensors[0], trips=2)

    def _begin(self, kind: str, whole: Tensor, trips: int) -> "Work":
        now = perf_counter()
        start = max(now, self._free)
        moved = trips * whole.nbytes * (RANKS - 1) / RANKS  # in a ring
        self._free = start + trips * self.latency + moved / self._bandwidth
        collective = Collective(kind, whole.nbytes, now, Span(start, self._free))
        self.timeline.collectives.append(collective)
        work = Work(collective, self.timeline.waits)
        if self._at_once:
            work.wait()
        return work


class Work:
    """A collective under way, done at a time that is known."""

    def __init__(self, of: Collective, waits: list[Span]) -> None:
        self._of, self._waits = of, waits

    def wait(self) -> None:
        """Until it is done."""
        now, done = perf_counter(), self._of.link.stop
        self._of.awaited = now
        if now < done:
            sleep(done - now)  # a busy machine sleeps longer, which is not the link's
            self._waits.append(Span(now, done))


class LinkedMesh(Mesh):
    """A mesh whose axes communicate over one link."""

    def __init__(self, link: Link) -> None:
        super().__init__(AXES)
        self._link = link

    def axis(self, *names: str) -> Axis:
        axis = super().axis(*names)
        return axis if axis.size == 1 else replace(axis, group=self._link)


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    programs = {name: program(SIZES, AXES, state=state) for name, state in STATES.items()}
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    print(f"{where()}, one thread")
    rounds = 2 if quick else 9
    for latency in [DRAWN] if quick else LATENCIES:
        _report(
            latency,
            {
                name: in_turns(_steps(emitted, latency), rounds)
                for name, emitted in programs.items()
            },
        )
    dist.destroy_process_group()


def _steps(emitted: ModuleType, latency: float) -> dict[str, Callable[[], Timeline]]:
    return {
        "overlapped": _step(emitted, Link(latency, BANDWIDTH)),
        "at once": _step(emitted, Link(latency, BANDWIDTH, at_once=True)),
        "without link": _step(emitted, Link(0.0, float("inf"))),
    }


def _step(emitted: ModuleType, link: Link) -> Callable[[], Timeline]:
    """Records one training step."""
    model, state = emitted.build(LinkedMesh(link))
    state.initialise(0)
    own = batch(emitted, *random_rows(SIZES, seed=0))
    _watch(model, link)

    def run() -> Timeline:
        link.timeline = timeline = Timeline()
        timeline.step.start = perf_counter()
        emitted.train_step(model, state, own, 1e-3)
        timeline.step.stop = perf_counter()
        return timeline

    return run


def _watch(model: nn.Module, link: Link) -> None:
    """Notes when its forward and backward begin and end."""

    def forward_begins(*_: Any) -> None:
        link.timeline.forward.start = perf_counter()

    def forward_ends(_: nn.Module, __: Any, loss: Tensor) -> None:
        link.timeline.forward.stop = perf_counter()
        loss.register_hook(backward_begins)

    def backward_begins(_: Tensor) -> None:
        link.timeline.backward.start = perf_counter()
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(backward_ends)

    def backward_ends() -> None:
        link.timeline.backward.stop = perf_counter()

    model.register_forward_pre_hook(forward_begins)
    model.register_forward_hook(forward_ends)


def _report(latency: float, timelines: dict[str, dict[str, list[Timeline]]]) -> None:
    title = (
        f"{_milliseconds(latency)} + bytes / {BANDWIDTH / 1e9:.0f} GB/s a trip: medians of steps"
    )
    orders = ("first reduction before backward ends", "last gather before forward ends")
    columns = (
        "state",
        *orders,
        "exposed, of layers",
        "of all",
        "step",
        "awaited at once",
        "without link",
    )
    table(title, columns, [(name, *_row(kinds)) for name, kinds in timelines.items()])
    if latency == DRAWN:
        for name, kinds in timelines.items():
            _draw(name, kinds["overlapped"][-1])


def _row(kinds: dict[str, list[Timeline]]) -> list[str]:
    of = kinds["overlapped"]
    gathers = [gather for gather in (each.last_gather() for each in of) if gather is not None]
    shares = [
        f"{median(each.exposed(of_layers) for each in of):.0%}" for of_layers in (True, False)
    ]
    steps = [_milliseconds(median(each.step.length for each in kinds[kind])) for kind in kinds]
    return [_before([each.first_reduction() for each in of]), _before(gathers), *shares, *steps]


def _before(times: Sequence[float]) -> str:
    if not times:
        return "none"
    least = min(times)
    return (
        f"yes, by {_milliseconds(median(times))}"
        if least > 0
        else f"NO, {_milliseconds(-least)} after"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _draw(name: str, timeline: Timeline) -> None:
    """A step from left to right: what the rank is at, what the link is at, when the program
    waits.
    """
    drawn = partial(_drawn, timeline.step)
    links = [(each.link, each.kind[0]) for each in timeline.collectives]
    waits = [(wait, "w") for wait in timeline.waits]
    print(f"\n{name}: a column is {_milliseconds(timeline.step.length / WIDTH)}")
    print(f"  rank  {drawn([(timeline.forward, 'F'), (timeline.backward, 'B')])}")
    print(f"  link  {drawn(links)}   g gathers, r reduces")
    print(f"  waits {drawn(waits)}")


def _drawn(step: Span, spans: Sequence[tuple[Span, str]]) -> str:
    line = ["."] * WIDTH
    for span, letter in spans:
        first, last = (
            int((time - step.start) / step.length * WIDTH) for time in (span.start, span.stop)
        )
        line[first : last + 1] = letter * len(line[first : last + 1])
    return "".join(line)


if __name__ == "__main__":
    main()
