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
    return tomllib.loads(
        (Path(__file__).parent / "profiles" / f"{name}.toml").read_text(encoding="utf-8")
    )


def stage_layers(layers: int, stages: int) -> list[int]:
    """The layers of each stage where the embedding and the head take the place of a layer each.

    Raises Unsaid.
    """
    each, left = divmod(layers + 2, stages)
    if left or each < 2 or stages < 2:
        raise Unsaid(f"{layers} layers, an embedding and a head in {stages} equal stages")
    return [each - 1, *[each] * (stages - 2), each - 1]


def gpt(sizes: Mapping[str, int], options: Sequence[str] = ()) -> str:
    """A GPT with learned positions and layer norms; its options: `bias` of products, `gated`
    (SwiGLU), `tied`.
    """
    bias, gated, tied = (option in options for option in ("bias", "gated", "tied"))
    plus = {name: f" + {name}[{dims}]" if bias else "" for name, dims in BIASES.items()}
    up = "m @ w_in[hidden -> ffn]" + plus["b_in"]
    gate = f"silu(m @ w_gate[hidden -> ffn]{plus['b_gate']}) * ({up})"
    return MODEL.format(
        dims="  ".join(f"{name} = {size}" for name, size in sizes.items()),
        qkv="\n    ".join(
            f"{n} = a @ w{n}[hidden -> heads, head_dim]{plus[f'b{n}']}" for n in "qkv"
        ),
        bo=plus["bo"],
        up=gate if gated else f"gelu({up})",
        b_out=plus["b_out"],
        head="wte" if tied else "head[hidden -> vocab]",
    )


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
  x = embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden]
  repeat layers {{
    a = layernorm(x, norm1[hidden], bias1[hidden], 1e-5)
    {qkv}
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]{bo}
    m = layernorm(x, norm2[hidden], bias2[hidden], 1e-5)
    x = x + ({up}) @ w_out[ffn -> hidden]{b_out}
  }}
  loss = cross_entropy(layernorm(x, norm[hidden], bias[hidden], 1e-5) @ {head}, labels)
}}
"""


def train(seq: int, global_batch: int, microbatch: int, more: str = "") -> str:
    """The section of training in mixed precision by Adam."""
    return (
        f"train {{\n  seq = {seq}  global_batch = {global_batch}  microbatch = {microbatch} "
        " steps = 1"
        f"  precision = bf16  kernels = triton  {more}\n"
        '  optimizer adamw { lr = 1e-4 }\n  data text { files = ["a"] }\n}\n'
    )
