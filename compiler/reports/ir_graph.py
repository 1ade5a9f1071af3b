"""A program at any level as a graph: `scalec ir --graph`."""

import json
from collections.abc import Iterator
from typing import Any

from networkx import (
    MultiDiGraph,
    generate_graphml,  # pyright: ignore[reportUnknownVariableType]
    node_link_data,  # pyright: ignore[reportUnknownVariableType]
)

from ..ir import Op, Program, Region
from ..ir.printer import print_op, print_type
from ..syntax.source import Span


class _Builder:
    """Adds a program's nodes in the order of the IR, where each value is made before its uses."""

    def __init__(self, program: Program) -> None:
        self.graph: Any = MultiDiGraph(name=f"{program.name} after {program.after}")
        self._types = {name: print_type(type) for name, type in program.types.items()}
        self._made: dict[str, int] = {}
        for param in program.params:
            self._made[param.name] = self._node(None, f"param {param.name}", "param", param.span)
        for buffer in program.buffers:
            self._made[buffer.name] = self._node(
                None, f"buffer {buffer.name}", "buffer", buffer.span
            )
        self._region(program.region, None)

    def _node(self, parent: int | None, label: str, kind: str, span: Span, **more: str) -> int:
        number = self.graph.number_of_nodes()
        inside = {} if parent is None else {"parent": parent}
        self.graph.add_node(number, kind=kind, label=label, line=str(span), **more, **inside)
        return number

    def _uses(self, name: str, node: int, role: str) -> None:
        self.graph.add_edge(self._made[name], node, value=name, type=self._types[name], role=role)

    def _op(self, op: Op, parent: int) -> None:
        node = self._node(parent, op.kind, op.kind, op.span, text=print_op(op))
        for name in op.inputs:
            self._uses(name, node, "operand")
        for value in op.outputs:
            self._made[value.name] = node

    def _region(self, region: Region, parent: int | None) -> None:
        """Adds a region as one node.

        Edges of values that enter the region end at this node and go on from it into the body;
        edges of values that leave the region go through it too.
        """
        direction = "reversed" if region.reverse else ""
        words = (region.kind, region.dim, direction)
        node = self._node(parent, " ".join(filter(None, words)), region.kind, region.span)
        for arg in region.args:
            if parent is not None:
                self._uses(arg.source, node, arg.enter.value)
            self._made[arg.value.name] = node
        for stmt in region.body:
            if isinstance(stmt, Region):
                self._region(stmt, node)
            else:
                self._op(stmt, node)
        for end in region.yields:
            self._uses(end.name, node, end.leave.value)
        for value in region.results:
            self._made[value.name] = node


def ir_graph(program: Program) -> Any:
    """The graph, a `networkx.MultiDiGraph`.

    A node has a `kind`, a `label`, its `line` in the plan and the region that is its `parent`, an
    op its IR `text` too; an edge has the name and `type` of a `value`, and its `role`: an operand,
    or how it enters or leaves a region.
    """
    return _Builder(program).graph


def print_graph(program: Program, form: str) -> str:
    """The graph as text in one of FORMATS."""
    graph = ir_graph(program)
    if form == "dot":
        return "\n".join(_dot(graph)) + "\n"
    if form == "json":
        return json.dumps(node_link_data(graph, edges="edges"), indent=1) + "\n"
    return "\n".join(generate_graphml(graph)) + "\n"


def _dot(graph: Any) -> Iterator[str]:
    """Each region is a cluster that has its own node in it."""
    inside: dict[int | None, list[int]] = {}
    for node, parent in graph.nodes(data="parent"):
        inside.setdefault(parent, []).append(node)
    yield f"digraph {_quoted(graph.name)} {{"
    yield "  node [shape=box]"
    yield from _dot_nodes(graph, inside, None, "  ")
    for source, target, edge in graph.edges(data=True):
        label = _quoted(f"{edge['value']}: {edge['type']}")
        yield f"  {source} -> {target} [label={label}, class={edge['role']}]"
    yield "}"


def _dot_nodes(
    graph: Any, inside: dict[int | None, list[int]], parent: int | None, indent: str
) -> Iterator[str]:
    for node in inside.get(parent, ()):
        attributes = graph.nodes[node]
        tooltip = attributes.get("text", attributes["line"])
        text = f"{node} [label={_quoted(attributes['label'])}, tooltip={_quoted(tooltip)}]"
        if node not in inside:
            yield f"{indent}{text}"
            continue
        yield f"{indent}subgraph cluster_{node} {{"
        yield f"{indent}  {text}"
        yield from _dot_nodes(graph, inside, node, f"{indent}  ")
        yield f"{indent}}}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
