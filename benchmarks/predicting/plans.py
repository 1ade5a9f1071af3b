"""The plan that says what a row of published measurements ran, and its program.

Element types that the plan language lacks (fp8 and narrower) are said as bf16: placements and sizes
are the same.
"""

from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

from .rows import Row, Unsaid

MODEL = """model published(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = {vocab}  hidden = {hidden}  heads = {heads}
    kv_heads = {kv_heads}  head_dim = {head_dim}
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

MLP = {
    "yes": "(silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn]))",
    "no": "gelu(m @ w_up[hidden -> ffn])",
}
HEAD = {"yes": "wte", "no": "head[hidden -> vocab]"}

TYPES = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
"""Element types of products in published rows."""

NEEDED = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "head_dim",
    "vocab",
    "seq",
    "micro_batch",
    "global_batch",
)
"""The columns without which a row has no plan."""


def degree(row: Row, column: str) -> int:
    """A whole number of a row, 1 where it says none."""
    return int(row[column] or 1)


def compiled(row: Row) -> Program:
    """The program of a row's plan.  Raises Unsaid or PlanError."""
    return compile_plan(Source("row.scale", plan(row)))


def plan(row: Row) -> str:
    """The plan that says what a row ran.  Raises Unsaid."""
    if missing := [column for column in NEEDED if not row[column]]:
        raise Unsaid(f"it lacks {', '.join(missing)}")
    if (row["compute"] or "bf16") not in TYPES:
        raise Unsaid(f"products in {row['compute']}")
    degrees = {axis: degree(row, axis) for axis in ("pp", "dp", "cp", "tp")}
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
        **{**row, "kv_heads": row["kv_heads"] or row["heads"]},
        mlp=MLP[row["gated"]],
        head=HEAD[row["tied"]],
    )
    text += f"mesh {{ {mesh} }}\nshard {{\n{chr(10).join(claims)}\n}}\n" if mesh else ""
    if degrees["dp"] > 1:
        text += f"state {{ zero {row['zero'] or 0} over dp }}\n"
    if degrees["pp"] > 1:
        chunks = degree(row, "vpp")
        text += (
            f"pipeline {{ schedule ="
            f" {f'interleaved_1f1b(chunks={chunks})' if chunks > 1 else '1f1b'} }}\n"
        )
    precision = "fp16" if row["compute"] == "fp16" else "bf16"
    return text + (
        f"train {{\n  seq = {row['seq']}  global_batch = {row['global_batch']}  microbatch ="
        f" {row['micro_batch']}"
        f"  steps = 1  precision = {precision}  kernels = triton  {_recompute(row)}\n"
        '  optimizer adamw { lr = 1e-4 }\n  data text { files = ["a"] }\n}\n'
    )


def _recompute(row: Row) -> str:
    """Selective recomputation is that of attention's scores; of kernels that make none, of
    every second layer.
    """
    if row["recompute"] == "selective":
        is_unfused = row["attention"] == "unfused"
        return f"recompute = {'selective(attention)' if is_unfused else 'every(2, layers)'}"
    return "recompute = full" if row["recompute"] == "full" else ""
