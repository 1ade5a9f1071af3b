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
from ...schedules.dependencies import Value, get_inputs, get_result
from ...schedules.timeline import Slot
from ..hardware import Hardware
from .clocks import GPU, HOST, Again, Event, Seconds, Stream, add, nothing
from .events import get_expanded_events, get_unrolled_events
from .pipeline import Rows
from .prices import EXPOSED, prices
from .timeline import Walk

MOST = 20_000
"""Iterations of more events than this are one node of each stream."""

EQUAL = 1e-9
"""Seconds that the end of a collective and the time of the wait for it may differ by, as both are
sums of rounded numbers.
"""


@frozen
class CriticalPath:
    """The seconds on the path by kind and plan line, which add up to the step; and the least slack
    of each kind and line.

    The slack of an op is how many seconds longer it may take before the step takes longer.
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
    """Nodes are work that takes time, from begin to end, by kind and line; edges come from the
    older work that it waits for.
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
        for earlier in after:
            if earlier is not None:
                earlier_begin, earlier_end, _ = self._nodes[earlier]
                self._graph.add_edge(earlier, number, weight=earlier_end - earlier_begin)
        return number

    def end(self, number: int) -> float:
        """When a node ends."""
        return self._nodes[number][1]

    def path(self, total: float) -> CriticalPath:
        """The longest path, and the slack of lines, of a step that takes `total`: what ends
        later does not count.
        """
        from networkx import dag_longest_path

        late = [number for number, (_, end, _) in enumerate(self._nodes) if end > total + EQUAL]
        self._graph.remove_nodes_from(late)
        ends = [number for number in self._graph if not self._graph.out_degree(number)]
        self.node(total, total, nothing(), ends)
        longest: list[int] = dag_longest_path(self._graph)
        on_path, slack = nothing(), nothing()
        for number in longest:
            begin, end, lines = self._nodes[number]
            whole = sum(lines.values())
            for key, seconds in lines.items():
                on_path[key] += seconds * (end - begin) / whole
        for number, node_slack in self._slack().items():
            for key in self._nodes[number][2]:
                slack[key] = min(node_slack, slack.get(key, node_slack))
        return CriticalPath(sum(on_path.values()), on_path, slack)

    def _slack(self) -> dict[int, float]:
        """By node, the seconds until it delays the step, through the nodes that wait for it; nodes
        in reverse order.
        """
        slack_by_node = dict[int, float]()
        for number in sorted(self._graph, reverse=True):
            end = self._nodes[number][1]
            latest = list[float]()  # when each node that waits for it has to begin
            for later in self._graph.successors(number):
                latest.append(self._nodes[later][0] + slack_by_node[later])
            slack_by_node[number] = max(min(latest, default=end) - end, 0.0)
        return slack_by_node


# ---- one rank


class Streams:
    """The graph of a walk's events."""

    def __init__(self) -> None:
        self.graph = _Graph()
        self._last = dict[Stream, int]()
        self._sent = list[tuple[float, int]]()  # the ends of collectives, in order

    def add(self, events: Sequence[Event | Again]) -> None:
        """Adds events, in the order that the program begins them in."""
        for event, later in get_unrolled_events(events, MOST, {}):
            if isinstance(event, Event):
                self._event(event)
            else:
                self._iterations(event, later)

    def _event(self, event: Event) -> None:
        last, begin, end = self._last.get, event.begin, event.end
        lines = _only(event.kind, event.line, end - begin)
        if event.stream == HOST:
            node = self.graph.node(begin, end, lines, [last(HOST), self._find_awaited_node(event)])
        elif not isinstance(event.stream, str):
            lines = _only(f"{event.kind}: {' × '.join(event.stream)}", event.line, end - begin)
            causes = [last(event.stream), last(GPU), last(HOST), self._find_arrived_node(event.due)]
            node = self.graph.node(begin, end, lines, causes)
            insort(self._sent, (end, node))
        elif event.kind == HOST or event.kind.startswith(EXPOSED):
            # a wait takes no time of its own on the path: its cause does
            cause = last(HOST) if event.kind == HOST else self._find_arrived_node(event.due)
            node = self.graph.node(end, end, nothing(), [last(GPU), cause])
        else:
            node = self.graph.node(begin, end, lines, [last(GPU)])
        self._last[event.stream] = node

    def _find_awaited_node(self, event: Event) -> int | None:
        """The GPU's last work, where the host has waited for it before it issues an op."""
        host, gpu = self._last.get(HOST), self._last.get(GPU)
        if gpu is None or self.graph.end(gpu) > event.begin + EQUAL:
            return None
        host_end = 0.0 if host is None else self.graph.end(host)
        if host_end < event.begin - EQUAL:  # it was idle
            return gpu
        return None

    def _find_arrived_node(self, due: float) -> int | None:
        """The collective that ends when what is waited for is there."""
        place = bisect_right(self._sent, (due + EQUAL, len(self._sent)))
        if not place:
            return None
        end, node = self._sent[place - 1]
        return node if end > due - EQUAL else None

    def _iterations(self, again: Again, later: Mapping[Stream, float]) -> None:
        """Iterations of each stream as one; on the path each line has the GPU's time."""
        lines, ends = nothing(), dict[Stream, float]()
        for event in get_expanded_events(again.events, MOST, later):
            ends[event.stream] = event.end
            if event.stream == GPU:
                add(lines, _only(event.kind, event.line, event.end - event.begin))
        for stream, shift in again.shift.items():
            if shift and stream in ends:
                begin, end = ends[stream], ends[stream] + again.times * shift
                self._last[stream] = self.graph.node(begin, end, lines, [self._last.get(stream)])


# ---- a pipeline


class _Row:
    """The graph of a pipeline: actions after what they wait for, between what ranks do before
    and after their rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows, self._graph = rows, _Graph()
        self._last, self._ready = dict[int, int](), dict[int, int]()  # by rank, by stage
        self._node_by_value, self._node_by_stage = dict[Value, int](), dict[int, int]()

    def path(self) -> CriticalPath:
        """The critical path of all ranks."""
        rows, ranks = self._rows, range(len(self._rows.ranks))
        for rank in ranks:
            self._before(rank)
        slots = chain.from_iterable(rows.timeline.slots)
        for slot in sorted(slots, key=lambda slot: (slot.start, slot.end)):
            self._action(slot)
        ends = list[int]()
        for rank in ranks:
            ends.append(self._last[rank])
            ends += self._reductions(rank)
        for work in rows.ranks:
            end = rows.reduced + work.after.gpu
            self._graph.node(rows.reduced, end, work.after.spent, ends)
        return self._graph.path(rows.seconds)

    def _before(self, rank: int) -> None:
        work = self._rows.ranks[rank]
        row_begin = work.before.gpu
        self._last[rank] = self._graph.node(0.0, row_begin, work.before.spent)
        for stage, (end, move) in work.ready.items():
            lines = _only(move.kind, move.line)
            self._ready[stage] = self._graph.node(row_begin, end, lines, [self._last[rank]])

    def _action(self, slot: Slot) -> None:
        rows, action = self._rows, slot.action
        rank, spent = rows.schedule.stage_to_rank[action.stage], nothing()
        for part in rows.clocks(action):
            add(spent, part.spent)
        after = [self._last[rank], self._ready.get(action.stage)]
        after += [self._value(value, action) for value in get_inputs(action, rows.schedule.stages)]
        node = self._graph.node(slot.start, slot.end, spent, after)
        self._last[rank] = self._node_by_stage[action.stage] = node
        if value := get_result(action):
            self._node_by_value[value] = node

    def _value(self, value: Value, action: Action) -> int:
        """The node that makes a value, or its message to another rank."""
        maker, ranks = self._node_by_value[value], self._rows.schedule.stage_to_rank
        if ranks[value.stage] == ranks[action.stage]:
            return maker
        begin = self._graph.end(maker)
        end = begin + self._rows.times.cuts[min(value.stage, action.stage)]
        return self._graph.node(begin, end, _only("message", self._rows.line), [maker])

    def _reductions(self, rank: int) -> Iterator[int]:
        """A rank's reductions, in one group after another."""
        last = dict[tuple[str, ...], int]()
        for begin, end, move in self._rows.reductions(rank):
            after: list[int | None] = [self._node_by_stage[stage] for stage in move.stages]
            after += [last.get(axes) for axes, _ in move.sends]
            node = self._graph.node(begin, end, _only(move.kind, move.line), after)
            last |= {axes: node for axes, _ in move.sends}
            yield node


def _only(kind: str, line: str, seconds: float = 1.0) -> Seconds:
    """Seconds of one kind and line, if there are any."""
    only = nothing()
    if seconds > 0:
        only[kind, line] = seconds
    return only
