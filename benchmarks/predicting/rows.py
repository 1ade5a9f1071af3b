"""Rows of published measurements, and why one cannot be predicted."""

import csv
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from scalec.compiler.syntax.diagnostics import PlanError

Row = Mapping[str, str]


class Unsaid(Exception):
    """Why no plan says what a row ran."""


def read(path: Path) -> list[Row]:
    """All rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def why(error: Exception) -> str:
    """The reason of an error in words."""
    return error.diagnostics[0].message if isinstance(error, PlanError) else str(error)


@lru_cache
def profile(name: str) -> Mapping[str, Any]:
    """The numbers of a framework's profile."""
    return tomllib.loads((Path(__file__).parent / "profiles" / f"{name}.toml").read_text(encoding="utf-8"))


def stage_layers(layers: int, stages: int) -> list[int]:
    """The layers of each stage where the embedding and the head take the place of a layer each.  Raises Unsaid."""
    each, left = divmod(layers + 2, stages)
    if left or each < 2 or stages < 2:
        raise Unsaid(f"{layers} layers, an embedding and a head in {stages} equal stages")
    return [each - 1, *[each] * (stages - 2), each - 1]


def gpt(sizes: Mapping[str, int], options: Sequence[str] = ()) -> str:
    """A GPT with learned positions, layer norms and a GELU.

    Its options are `bias` of products, `gated` (SwiGLU), `tied` (head and embedding), and `dropout`.
    """
    bias, gated, tied, dropped = (option in options for option in ("bias", "gated", "tied", "dropout"))
    plus = {name: f" + {name}[{dims}]" if bias else "" for name, dims in BIASES.items()}
    up = "m @ w_in[hidden -> ffn]" + plus["b_in"]
    gate = f"silu(m @ w_gate[hidden -> ffn]{plus['b_gate']}) * ({up})"
    o = "attention(q, k, v, mask=causal" + (f", dropout={DROPOUT})" if dropped else ")")
    o = f"{o} @ wo[heads, head_dim -> hidden]{plus['bo']}"
    out = f"({gate if gated else f'gelu({up})'}) @ w_out[ffn -> hidden]{plus['b_out']}"
    embedded = "embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden]"
    return MODEL.format(
        dims="  ".join(f"{name} = {size}" for name, size in sizes.items()),
        embedded=_dropped(embedded, dropped),
        qkv="\n    ".join(f"{n} = a @ w{n}[hidden -> heads, head_dim]{plus[f'b{n}']}" for n in "qkv"),
        attended=_dropped(o, dropped),
        mlp=_dropped(out, dropped),
        head="wte" if tied else "head[hidden -> vocab]",
    )


DROPOUT = 0.1
"""Megatron's default, of activations and of attention's weights."""

BIASES = {
    "bq": "heads, head_dim",
    "bk": "heads, head_dim",
    "bv": "heads, head_dim",
    "bo": "hidden",
    "b_in": "ffn",
    "b_gate": "ffn",
    "b_out": "hidden",
}

MODEL = """model gpt(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ {dims} }}
  init ~ normal(0.02)
  x = {embedded}
  repeat layers {{
    a = layernorm(x, norm1[hidden], bias1[hidden], 1e-5)
    {qkv}
    x = x + {attended}
    m = layernorm(x, norm2[hidden], bias2[hidden], 1e-5)
    x = x + {mlp}
  }}
  loss = cross_entropy(layernorm(x, norm[hidden], bias[hidden], 1e-5) @ {head}, labels)
}}
"""


def _dropped(value: str, dropped: bool) -> str:
    return f"dropout({value}, {DROPOUT})" if dropped else value


def train(seq: int, global_batch: int, microbatch: int, more: str = "") -> str:
    """The section of training in mixed precision by Adam."""
    return (
        f"train {{\n  seq = {seq}  global_batch = {global_batch}  microbatch = {microbatch}  steps = 1"
        f"  precision = bf16  kernels = triton  {more}\n"
        '  optimizer adamw { lr = 1e-4 }\n  data text { files = ["a"] }\n}\n'
    )
