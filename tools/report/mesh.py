"""The mesh on its machines: for each axis the ranks of a group, the nodes they are on, and what
the axis shards.
"""

from collections.abc import Sequence

from attrs import frozen

from ...compiler.analysis.link_traffic import crosses
from ...compiler.config.units import amount, count_words
from ...compiler.ir import Axis, Program
from ...compiler.reports.summary import get_launch
from ..drawing import SERIES, Canvas, fit, text_width
from .calls import Call
from .subject import Subject

NODES = 4
"""How many nodes are drawn of an axis; of the others there is the number."""

RANKS = 16
"""How many ranks are drawn of a node."""


@frozen
class Node:
    """A node by its number, its first ranks, and which of them are in the group of rank 0; `more`
    ranks are not drawn.
    """

    number: int
    ranks: tuple[int, ...]
    group: frozenset[int]
    more: int


@frozen
class Group:
    """The group of rank 0 over one axis.

    use       what the axis is for: the dims that it shards, layers that it cuts, state that it
              shares out
    sent      bytes that a rank sends over the axis alone, or with others
    nodes     the first of the nodes that it is on; `more` others are not drawn
    """

    axis: str
    size: int
    crosses: bool
    use: str
    sent: int
    nodes: tuple[Node, ...]
    more: int


@frozen
class Mesh:
    """All axes, outermost first."""

    gpu: str
    ranks: int
    nodes: int
    ranks_per_node: int
    groups: tuple[Group, ...]


def mesh(subject: Subject, calls: Sequence[Call]) -> Mesh:
    """The mesh of a plan."""
    program = subject.program
    per_node, stride, groups = get_launch(program).ranks_per_node, 1, list[Group]()
    for axis in reversed(program.axes):
        groups.insert(0, _group(program, axis, stride, per_node, calls))
        stride *= axis.size
    return Mesh(program.cluster.gpu, program.ranks, program.cluster.nodes, per_node, tuple(groups))


def _group(
    program: Program, axis: Axis, stride: int, per_node: int, calls: Sequence[Call]
) -> Group:
    members = range(0, axis.size * stride, stride)
    numbers = list(dict.fromkeys(rank // per_node for rank in members))
    nodes = tuple(_node(number, per_node, members) for number in numbers[:NODES])
    return Group(
        axis=axis.name,
        size=axis.size,
        crosses=crosses(program, (axis.name,), per_node),
        use=_use(program, axis),
        sent=sum(call.sent for call in calls if axis.name in call.axes),
        nodes=nodes,
        more=len(numbers) - len(nodes),
    )


def _node(number: int, per_node: int, members: range) -> Node:
    first = number * per_node
    shown = tuple(range(first, first + min(per_node, RANKS)))
    return Node(number, shown, frozenset(shown) & frozenset(members), per_node - len(shown))


def _use(program: Program, axis: Axis) -> str:
    """For instance `batch; state of parameters, gradients, optimizer`."""
    uses: list[str] = []
    dims = dict.fromkeys(claim.dim for claim in program.claims if claim.axis == axis.name)
    if dims:
        uses.append(", ".join(dims))
    if program.pipeline and program.pipeline.axis == axis.name:
        uses.append(f"stages of {', '.join(program.pipeline.dims)}")
    sharded_parts: dict[str, None] = {}
    for state in program.state:
        for part in ("parameters", "gradients", "optimizer"):
            if axis.name in getattr(state, part):
                sharded_parts[part] = None
    if sharded_parts:
        uses.append(f"state of {', '.join(sharded_parts)}")
    return "; ".join(uses)


WIDTH, LEFT, GAP, ROW, MORE = 1080, 330, 14, 60, 130
SMALL = 5.8
"""The width of a small letter."""


def drawing(mesh: Mesh) -> str:
    """A row for each axis: what it shards and sends, and the ranks of a group on their nodes."""
    canvas = Canvas(WIDTH)
    for number, group in enumerate(mesh.groups):
        _draw(canvas, mesh, group, number, 14 + number * ROW)
    nodes = f"{count_words(mesh.nodes, 'node')} of {mesh.ranks_per_node}"
    where = f"{count_words(mesh.ranks, 'rank')} on {nodes}"
    if mesh.gpu:
        where += f" {mesh.gpu}"
    foot = 14 + len(mesh.groups) * ROW + 8
    canvas.words(0, foot, where, "muted")
    _draw_legend(canvas, LEFT, foot)
    return canvas.svg("the mesh on its machines")


def _draw_legend(canvas: Canvas, left: float, foot: float) -> None:
    in_group, beside = "the group of rank 0 over the axis", "other ranks of these nodes"
    canvas.box(left, foot - 9, 11, 11, "s0")
    canvas.words(left + 17, foot, in_group, "muted")
    left += 17 + text_width(f"{in_group}    ")
    canvas.box(left, foot - 9, 11, 11, "blank")
    canvas.words(left + 17, foot, beside, "muted")


def _draw(canvas: Canvas, mesh: Mesh, group: Group, number: int, top: float) -> None:
    """Draws the row of an axis, which is the `number`th from the outermost on."""
    series = number % SERIES
    _draw_axis(canvas, group, series, top)
    room, ranks = WIDTH - LEFT - MORE, len(group.nodes[0].ranks)
    cell = min(len(str(mesh.ranks)) * SMALL + 5, room / ranks)
    count = max(int(room / (ranks * cell + 6 + GAP)), 1)
    x = float(LEFT)
    for node in group.nodes[:count]:
        x = _draw_node(canvas, node, f"s{series}", x, top - 12, cell) + GAP
    if more := group.more + len(group.nodes[count:]):
        canvas.words(x, top + 8, f"… and {more:,} more", "muted")


def _draw_axis(canvas: Canvas, group: Group, series: int, top: float) -> None:
    """Draws the words at the left: the axis, its use, its links."""
    name = f"{group.axis} {group.size:,}"
    first_use, _, other_uses = group.use.partition("; ")
    canvas.words(0, top + 4, name, f"head t{series}")
    canvas.words(
        text_width(f"{name}  "), top + 4, fit(first_use, LEFT - text_width(name) - 20), "muted"
    )
    canvas.words(0, top + 34, other_uses, "muted")
    links = "within a node"
    if group.size == 1:
        links = "alone"
    elif group.crosses:
        links = "across nodes"
    sends = f"{links}; a rank sends {amount(group.sent)} a step"
    canvas.words(0, top + 19, sends, "alarm" if group.crosses else "")


def _draw_node(canvas: Canvas, node: Node, style: str, x: float, top: float, cell: float) -> float:
    """Draws one node's ranks in a box; returns its right edge."""
    end = x + len(node.ranks) * cell + 6
    if node.more:
        end += 24
    canvas.box(x, top, end - x, 32, "card", f"node {node.number}", 4)
    for place, rank in enumerate(node.ranks):
        box_style, words_style = "blank", "mid small muted"
        if rank in node.group:
            box_style, words_style = style, "mid small on"
        left = x + 4 + place * cell
        canvas.box(left, top + 4, cell - 2, 24, box_style, f"rank {rank}")
        canvas.words(left + cell / 2 - 1, top + 20, str(rank), words_style)
    if node.more:
        canvas.words(end - 6, top + 20, f"+{node.more}", "end small muted")
    canvas.words((x + end) / 2, top + 43, f"node {node.number:,}", "mid small muted")
    return end
