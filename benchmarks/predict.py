"""`.venv/bin/python benchmarks/predict.py ROWS.csv [--clusters FILE] [--json FILE] [--every N]`: others' steps, priced.

Each row of published measurements becomes a plan, is compiled, and its step is priced by data sheets and the network of
the row's cluster: no number of a row is used but what it ran, on what.  Printed are the errors of rows that have a
time, by source; the JSON has seconds and their parts for each row, or why the plan language cannot say it.

Rows of `memory.csv` and `pipeline.csv` are known by their columns; `predicting` has a module for each.

Non-goals: what a framework does otherwise than scalec: its host time, kernels and overlap are not in a row's plan.
"""

import json
import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter

from attrs import evolve
from predicting import figures, memory, pipeline
from predicting.reserved import print_errors, reserved
from predicting.rows import Row, Unsaid, read, why

from scalec.compiler.analysis.hardware import Hardware, named
from scalec.compiler.analysis.time.step import StepTime, step_time
from scalec.compiler.passes import compile_plan
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source

USABLE = 0.8
"""The part of its data sheet's rate that a network holds."""

MODEL = """model published(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = {vocab}  hidden = {hidden}  heads = {heads}  kv_heads = {kv_heads}  head_dim = {head_dim}
         ffn = {ffn}  layers = {layers} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    a = rmsnorm(x, norm1[hidden], 1e-5)
    q = rope(a @ wq[hidden -> heads, head_dim], 10000)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], 10000)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    m = rmsnorm(x, norm2[hidden], 1e-5)
    x = x + {mlp} @ w_down[ffn -> hidden]
  }}
  loss = cross_entropy(rmsnorm(x, norm[hidden], 1e-5) @ {head}, labels)
}}
"""

MLP = {"yes": "(silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn]))", "no": "gelu(m @ w_up[hidden -> ffn])"}
HEAD = {"yes": "wte", "no": "head[hidden -> vocab]"}


def main() -> None:
    parser = ArgumentParser(description=__doc__, prog="predict.py")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--clusters", type=Path, help="their networks; unset, clusters.csv beside the rows")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take one of so many rows")
    given = parser.parse_args()
    rows = read(given.rows)
    if rows and "T_F_ms" in rows[0]:
        _other(rows, pipeline.Predictor(rows), pipeline.FIGURES, given.json, lambda row: row["schedule"])
        return
    if rows and "other_args" in rows[0]:
        _other(rows, memory.predicted, memory.FIGURES, given.json, memory.kind)
        return
    clusters = {row["cluster"]: row for row in read(given.clusters or given.rows.with_name("clusters.csv"))}
    begin, found = perf_counter(), dict[str, dict[str, object]]()
    errors = defaultdict[str, list[float]](list)
    for row in islice(rows, 0, None, given.every):
        try:
            it = predicted(row, clusters)
            gib, fits = reserved(row, plan)
        except (Unsaid, PlanError) as error:
            found[row["id"]] = {"step_s": None, "why": why(error)}
            continue
        found[row["id"]] = {"step_s": it.seconds, "memory_gib": gib, "fits": fits, "parts": it.kinds}
        if row["status"] == "ok" and row["step_s"]:
            errors[row["source"]].append(it.seconds / float(row["step_s"]) - 1)
    took = perf_counter() - begin
    if given.json:
        given.json.write_text(json.dumps({"rows": found}, indent=1))
    unsaid = sum(it["step_s"] is None for it in found.values())
    print(f"{len(found)} rows in {took:.0f} s, {unsaid} that no plan says")
    errors["all"] = [error for each in errors.values() for error in each]
    figures.print_table("Predicted over measured, less 1", errors)
    print_errors(rows, found)


def _other(
    rows: Sequence[Row],
    predictor: Callable[[Row], Mapping[str, float]],
    names: Sequence[str],
    json_file: Path | None,
    group: Callable[[Row], str],
) -> None:
    """Predicts rows that are no training steps."""
    found = figures.predicted(rows, predictor, names)
    if json_file:
        json_file.write_text(json.dumps({"rows": found}, indent=1))
    unsaid = sum(it[names[0]] is None for it in found.values())
    print(f"{len(found)} rows, {unsaid} that cannot be predicted")
    figures.print_errors(rows, found, names, group)


def predicted(row: Row, clusters: Mapping[str, Row]) -> StepTime:
    """The step of a row's plan on its cluster.  Raises Unsaid or PlanError."""
    return step_time(compile_plan(Source("row.scale", plan(row))), _on(row, clusters))


def plan(row: Row) -> str:
    """The plan that says what a row ran.  Raises Unsaid."""
    degrees = {axis: int(row[axis] or 1) for axis in ("pp", "dp", "cp", "tp")}
    if row["compute"] not in ("bf16", "fp16", ""):
        raise Unsaid(f"products in {row['compute']}")
    over = [
        ("batch", "dp"),
        ("seq", "cp as zigzag via ring"),
        ("vocab, heads, kv_heads, ffn", "tp"),
        *([("seq", "tp")] if row["sp"] == "yes" else []),
        ("layers", "pp"),
    ]
    claims = [f"  {dims} over {axis}" for dims, axis in over if degrees[axis.split()[0]] > 1]
    mesh = "  ".join(f"{axis} = {size}" for axis, size in degrees.items() if size > 1)
    text = MODEL.format(
        **{**row, "kv_heads": row["kv_heads"] or row["heads"]}, mlp=MLP[row["gated"]], head=HEAD[row["tied"]]
    )
    text += f"mesh {{ {mesh} }}\nshard {{\n{chr(10).join(claims)}\n}}\n" if mesh else ""
    if degrees["dp"] > 1:
        text += f"state {{ zero {row['zero'] or 0} over dp }}\n"
    if degrees["pp"] > 1:
        chunks = int(row["vpp"] or 1)
        text += f"pipeline {{ schedule = {f'interleaved_1f1b(chunks={chunks})' if chunks > 1 else '1f1b'} }}\n"
    recompute = "recompute = full" if row["recompute"] == "full" else ""
    return text + (
        f"train {{\n  seq = {row['seq']}  global_batch = {row['global_batch']}  microbatch = {row['micro_batch']}"
        f"  steps = 1  precision = {row['compute'] or 'bf16'}  kernels = triton  {recompute}\n"
        '  optimizer adamw { lr = 1e-4 }\n  data text { files = ["a"] }\n}\n'
    )


def _on(row: Row, clusters: Mapping[str, Row]) -> Hardware:
    """The row's GPU on the network of its cluster.  Raises Unsaid."""
    found = named(row["gpu"])
    if found is None:
        raise Unsaid(f"no data sheet of {row['gpu']}")
    network = (
        float(clusters[row["cluster"]]["node_gbit_s"] or 0) * 1e9 / 8 * USABLE if row["cluster"] in clusters else 0.0
    )
    return evolve(found, ranks_per_node=int(row["gpus_per_node"]), network=network or found.network)


if __name__ == "__main__":
    sys.exit(main())
