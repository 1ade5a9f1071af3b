"""The critical path of a step: the chain of ops and collectives that makes it as long as it is; the
slack of others.

The critical path method (Kelley and Walker 1959) on the graph of what waits for what, networkx's.
The nodes of a pipeline are actions, whose ops count by the time that they take of them.
"""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from attrs import frozen

from ...ir import Program
from ...schedules.actions import Action
from ...schedules.dependencies import Value, made_by, needs
from ...schedules.timeline import Slot
from ..hardware import Hardware
from .clocks import GPU, HOST, Again, Event, Seconds, Stream, add, nothing
from .events import expanded, unrolled
from .pipeline import Rows
from .prices import EXPOSED, prices
from .timeline import Walk

MOST = 20_000
"""Iterations of more events than this are one node of each stream."""

EQUAL = 1e-9
"""Seconds by which the end of a collective and the time when it is waited for may differ, as
they are added up.
"""


@frozen
class CriticalPath:
    """The seconds on the path by kind and plan line, which add up to the step; and the least slack
    of each.

    Slack is by how many seconds an op may take longer before the step does.
    """

    seconds: float
    on_path: Seconds
    slack: Seconds


def critical_path(program: Program, on: Hardware) -> CriticalPath:
    """The critical path of a step of a program after the last pass."""
    if program.pipeline:
        return _Row(Rows(program, program.pipeline, on)).path()
    walk = Walk(program, on, prices(program, on), record=True)
    walk.step()
    streams = Streams()
    streams.add(walk.clocks.events or ())
    return streams.graph.path(walk.clocks.gpu)


class _Graph:
    """Work that takes time, from begin to end, by kind and line; edges from what it waits for,
    which is older.
    """

    def __init__(self) -> None:
        from networkx import DiGraph

        self._nodes = list[tuple[float, float, Seconds]]()
        self._graph: DiGraph[int] = DiGraph()

    def node(
        self, begin: float, end: float, lines: Seconds, after: Iterable[int | None] = ()
    ) -> int:
        """A new node; its number."""
        number = len(self._nodes)
        self._nodes.append((begin, end, lines))
        self._graph.add_node(number)
        self._graph.add_edges_from(
            (it, number, {"weight": self._nodes[it][1] - self._nodes[it][0]})
            for it in after
            if it is not None
        )
        return number

    def end(self, number: int) -> float:
        """When a node ends."""
        return self._nodes[number][1]

    def path(self, total: float) -> CriticalPath:
        """The longest path, and the slack of lines, of a step that takes `total`: what ends
        later does not count.
        """
        from networkx import dag_longest_path

        self._graph.remove_nodes_from(
            [at for at, (_, end, _) in enumerate(self._nodes) if end > total + EQUAL]
        )
        self.node(
            total, total, nothing(), [it for it in self._graph if not self._graph.out_degree(it)]
        )
        longest: list[int] = dag_longest_path(self._graph)
        on_path, slack = nothing(), nothing()
        for begin, end, lines in (self._nodes[it] for it in longest):
            whole = sum(lines.values())
            for key, seconds in lines.items():
                on_path[key] += seconds * (end - begin) / whole
        for it, own in self._slack().items():
            for key in self._nodes[it][2]:
                slack[key] = min(own, slack.get(key, own))
        return CriticalPath(sum(on_path.values()), on_path, slack)

    def _slack(self) -> dict[int, float]:
        """Until what waits for it, or for that, and so on, would begin later; nodes in reverse
        order.
        """
        found = dict[int, float]()
        for it in sorted(self._graph, reverse=True):
            latest = (self._nodes[later][0] + found[later] for later in self._graph.successors(it))
            found[it] = max(min(latest, default=self._nodes[it][1]) - self._nodes[it][1], 0.0)
        return found


# ---- one rank


class Streams:
    """The graph of a walk's events."""

    def __init__(self) -> None:
        self.graph = _Graph()
        self._last = dict[Stream, int]()
        self._sent = list[tuple[float, int]]()  # the ends of collectives, in order

    def add(self, events: Sequence[Event | Again]) -> None:
        """Events in the order in which the program begins them."""
        for it, later in unrolled(events, MOST, {}):
            if isinstance(it, Event):
                self._event(it)
            else:
                self._iterations(it, later)

    def _event(self, it: Event) -> None:
        last, own = self._last.get, _only(it.kind, it.line, it.end - it.begin)
        if it.stream == HOST:
            node = self.graph.node(it.begin, it.end, own, [last(HOST), self._waited_for(it)])
        elif not isinstance(it.stream, str):
            own = _only(f"{it.kind}: {' × '.join(it.stream)}", it.line, it.end - it.begin)
            node = self.graph.node(
                it.begin,
                it.end,
                own,
                [last(it.stream), last(GPU), last(HOST), self._arrived(it.due)],
            )
            insort(self._sent, (it.end, node))
        elif it.kind == HOST or it.kind.startswith(EXPOSED):
            cause = last(HOST) if it.kind == HOST else self._arrived(it.due)
            node = self.graph.node(it.end, it.end, nothing(), [last(GPU), cause])
        else:
            node = self.graph.node(it.begin, it.end, own, [last(GPU)])
        self._last[it.stream] = node

    def _waited_for(self, it: Event) -> int | None:
        """The GPU's last work, where the host has waited for it before it issues an op."""
        host, gpu = self._last.get(HOST), self._last.get(GPU)
        is_idle = self.graph.end(host) < it.begin - EQUAL if host is not None else it.begin > EQUAL
        return (
            gpu if is_idle and gpu is not None and self.graph.end(gpu) <= it.begin + EQUAL else None
        )

    def _arrived(self, due: float) -> int | None:
        """The collective that ends when what is waited for is there."""
        at = bisect_right(self._sent, (due + EQUAL, len(self._sent)))
        return self._sent[at - 1][1] if at and self._sent[at - 1][0] > due - EQUAL else None

    def _iterations(self, it: Again, later: Mapping[Stream, float]) -> None:
        """Iterations of each stream as one; on the path each line has the GPU's time."""
        lines, ends = nothing(), dict[Stream, float]()
        for event in expanded(it.events, MOST, later):
            ends[event.stream] = event.end
            if event.stream == GPU:
                add(lines, _only(event.kind, event.line, event.end - event.begin))
        for stream, by in it.shift.items():
            if by and stream in ends:
                begin, end = ends[stream], ends[stream] + it.times * by
                self._last[stream] = self.graph.node(begin, end, lines, [self._last.get(stream)])


# ---- a pipeline


class _Row:
    """The graph of a pipeline: actions after what they wait for, between what ranks do before
    and after their rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows, self._graph = rows, _Graph()
        self._last, self._ready = dict[int, int](), dict[int, int]()  # by rank, by stage
        self._made, self._of_stage = dict[Value, int](), dict[int, int]()

    def path(self) -> CriticalPath:
        """The critical path of all ranks."""
        rows, ranks = self._rows, range(len(self._rows.ranks))
        for rank in ranks:
            self._before(rank)
        for slot in sorted(
            chain.from_iterable(rows.timeline.slots), key=lambda it: (it.start, it.end)
        ):
            self._action(slot)
        ends = [it for rank in ranks for it in (self._last[rank], *self._reductions(rank))]
        for after in (rank.after for rank in rows.ranks):
            self._graph.node(rows.reduced, rows.reduced + after.gpu, after.spent, ends)
        return self._graph.path(rows.seconds)

    def _before(self, rank: int) -> None:
        own = self._rows.ranks[rank]
        self._last[rank] = self._graph.node(0.0, own.before.gpu, own.before.spent)
        for stage, (there, move) in own.ready.items():
            self._ready[stage] = self._graph.node(
                own.before.gpu, there, _only(move.kind, move.line), [self._last[rank]]
            )

    def _action(self, slot: Slot) -> None:
        rows, action = self._rows, slot.action
        rank, spent = rows.schedule.stage_to_rank[action.stage], nothing()
        for part in rows.clocks(action):
            add(spent, part.spent)
        values = [self._value(it, action) for it in needs(action, rows.schedule.stages)]
        after = [self._last[rank], self._ready.get(action.stage), *values]
        self._last[rank] = self._of_stage[action.stage] = self._graph.node(
            slot.start, slot.end, spent, after
        )
        if value := made_by(action):
            self._made[value] = self._last[rank]

    def _value(self, value: Value, action: Action) -> int:
        """The node that makes a value, or its message to another rank."""
        made, ranks = self._made[value], self._rows.schedule.stage_to_rank
        if ranks[value.stage] == ranks[action.stage]:
            return made
        begin = self._graph.end(made)
        end = begin + self._rows.times.cuts[min(value.stage, action.stage)]
        return self._graph.node(begin, end, _only("message", self._rows.line), [made])

    def _reductions(self, rank: int) -> Iterator[int]:
        """A rank's reductions, in one group after another."""
        last = dict[tuple[str, ...], int]()
        for begin, end, move in self._rows.reductions(rank):
            before = [last.get(axes) for axes, _ in move.sends]
            node = self._graph.node(
                begin,
                end,
                _only(move.kind, move.line),
                [*(self._of_stage[it] for it in move.stages), *before],
            )
            last |= {axes: node for axes, _ in move.sends}
            yield node


def _only(kind: str, line: str, seconds: float = 1.0) -> Seconds:
    """Seconds of one kind and line, if there are any."""
    return Seconds(float, {(kind, line): seconds} if seconds > 0 else {})
