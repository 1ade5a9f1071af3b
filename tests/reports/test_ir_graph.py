"""`scalec ir --graph`: nodes and edges of every level, in formats that networkx reads back;
imported when asked.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from scalec.compiler.cli import main
from scalec.compiler.ir import Program, uses
from scalec.compiler.reports.ir_graph import ir_graph, print_graph
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan

PLANS = Path(__file__).parents[2] / "plans"
TINY = PLANS / "tiny_llama.scale"


def program(plan: str, stage: str = PASS_NAMES[-1]) -> Program:
    return compile_plan(load(PLANS / f"{plan}.scale"), stage)


@pytest.mark.parametrize("stage", PASS_NAMES)
@pytest.mark.parametrize("plan", ["tiny_llama", "tiny_pipeline", "distilbert_base"])
def test_every_op_is_a_node_and_every_use_an_edge(plan: str, stage: str) -> None:
    of = program(plan, stage)
    graph = ir_graph(of)
    texts = [text for _, text in graph.nodes(data="text") if text]
    assert len(texts) == len(of.ops)
    outside = len(of.region.args)  # the inputs of a program are made by nothing in it
    assert graph.number_of_edges() == uses(of.region).total() - outside


def test_a_repeat_is_a_cycle_through_its_node_and_without_regions_there_is_none() -> None:
    graph = ir_graph(program("tiny_llama", "resolve"))
    regions = {
        node
        for node, parent in graph.nodes(data="parent")
        for node in (parent,)
        if node is not None
    }
    assert {graph.nodes[node]["label"] for node in regions} == {"model", "repeat layers"}
    assert not nx.is_directed_acyclic_graph(graph)
    graph.remove_nodes_from(regions)
    assert nx.is_directed_acyclic_graph(graph)


def test_a_buffer_is_a_node() -> None:
    graph = ir_graph(program("deepseek_v3", "resolve"))
    (bias,) = (node for node, kind in graph.nodes(data="kind") if kind == "buffer")
    assert graph.nodes[bias] == {
        "kind": "buffer",
        "label": "buffer r_bias",
        "line": "models/deepseek_v3.scale:43",
    }
    assert {graph.nodes[to]["label"] for to in graph.successors(bias)} >= {"repeat layers_1"}


def test_an_edge_says_what_it_carries_and_how_it_enters() -> None:
    graph = ir_graph(program("tiny_llama", "resolve"))
    kind = dict(graph.nodes(data="kind"))
    found = {
        (kind[a], kind[b], edge["value"], edge["type"], edge["role"])
        for a, b, edge in graph.edges(data=True)
    }
    assert ("embedding", "repeat", "x", "f32[batch, seq, hidden]", "carry") in found
    assert ("leaf", "repeat", "norm1.1", "f32[layers, hidden]", "each") in found


def plain(graph: Any) -> tuple[Any, Any]:
    """A graph's nodes and edges with what they say."""
    return dict(graph.nodes(data=True)), sorted(
        (a, b, *sorted(edge.items())) for a, b, edge in graph.edges(data=True)
    )


def test_json_and_graphml_read_back_to_the_same_graph() -> None:
    of = program("tiny_pipeline")
    graph = ir_graph(of)
    assert plain(nx.node_link_graph(json.loads(print_graph(of, "json")), edges="edges")) == plain(
        graph
    )
    read = nx.parse_graphml(print_graph(of, "graphml"), node_type=int, force_multigraph=True)
    assert plain(read) == plain(graph)


def test_dot_has_a_cluster_for_each_region() -> None:
    of = program("tiny_llama", "resolve")
    text, graph = print_graph(of, "dot"), ir_graph(of)
    assert text.startswith('digraph "llama after resolve" {\n')
    assert text.count("{\n") == text.count("}\n")
    assert [*map(int, re.findall(r"^ *(\d+) \[", text, re.MULTILINE))] == [*graph.nodes]
    assert len(re.findall(r"^ *\d+ -> \d+ \[", text, re.MULTILINE)) == graph.number_of_edges()
    assert '[label="x: f32[batch, seq, hidden]", class=carry]' in text


@pytest.mark.parametrize("form", ["dot", "graphml", "json"])
def test_the_command_prints_it(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ir", str(TINY), "--graph", form, "--after", "propagate"]) == 0
    assert capsys.readouterr().out == print_graph(program("tiny_llama", "propagate"), form)


def test_another_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["ir", str(TINY), "--graph", "png"])
    assert "'dot', 'graphml', 'json'" in capsys.readouterr().err.replace(
        "dot, graphml, json", "'dot', 'graphml', 'json'"
    )


def test_a_plain_compile_never_imports_networkx(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["networkx"] = None
from scalec.compiler.cli import main
for plan in ({str(TINY)!r}, {str(PLANS / "tiny_pipeline.scale")!r}):
    assert main(["compile", plan, "-o", {str(tmp_path)!r} + "/out"]) == 0
    assert main(["ir", plan]) == 0
    assert main(["explain", "memory", plan]) == 0
"""
    result = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
