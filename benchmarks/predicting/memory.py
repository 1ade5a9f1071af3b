"""Memory that tests of Megatron-LM have allocated: after a step, and at most, on the last rank of a
pipeline.

The model's part of a rank is compiled alone; what a rank has of layers, microbatches and state
follows from the row, and what Megatron keeps that scalec does not from a profile.  Options are
those of its command line.

Non-goals: experts, fp8.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from scalec.compiler.config.gpus import GIB, MIB

from .parts import part_of
from .rows import Row, Unsaid, gpt, profile, train

FIGURES = ("static_gib", "peak_gib")
"""Columns that are predicted."""

VOCAB, MULTIPLE = 50_257, 128
"""GPT-2's vocabulary, which is padded to a multiple for each rank of tp."""

Options = Mapping[str, str]


@frozen
class Sizes:
    """The program of a row: its model's sizes and its degrees."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    vocab: int
    tokens: int
    dp: int
    tp: int
    cp: int
    pp: int
    chunks: int

    @classmethod
    def of(cls, row: Row, options: Options) -> "Sizes":
        """The sizes of a row.  Raises Unsaid."""
        degrees = {axis: int(row[axis] or 0) for axis in ("dp", "tp", "cp", "pp")}
        if not all(degrees.values()):
            raise Unsaid("it lacks degrees")
        hidden, vocab = (
            int(row["hidden"]),
            int(row["vocab_arg"] or options.get("vocab-size", VOCAB)),
        )
        multiple = int(options.get("make-vocab-size-divisible-by", MULTIPLE)) * degrees["tp"]
        ffn = 8 * hidden // 3 // 64 * 64 if "swiglu" in options else 4 * hidden
        return cls(
            int(row["layers"]),
            hidden,
            int(row["ffn"] or ffn),
            int(row["heads"]),
            -(-vocab // multiple) * multiple,
            int(row["micro_batch"]) * int(row["seq"]) // degrees["cp"],
            **degrees,
            chunks=int(row["vpp"] or 1),
        )


def predicted(row: Row) -> dict[str, float]:
    """The figures of a row.  Raises Unsaid or PlanError."""
    pairs = (it.partition("=") for it in row["other_args"].split())
    options: Options = {name: value for name, _, value in pairs}
    if row["experts"]:
        raise Unsaid("experts")
    if row["dtype"] != "bf16" or row["recompute"].startswith("selective"):
        raise Unsaid(f"{row['dtype']}, recompute {row['recompute']}")
    sizes, given = Sizes.of(row, options), profile("megatron_memory")
    part = part_of(_plan(row, sizes, options))
    layers = last_layers(sizes, options)
    params = sum(layers) * part.inner + part.outside_layers(sizes.pp == 1, is_last=True)
    shards = sizes.dp * sizes.cp if row["distributed_optimizer"] == "yes" else 1
    message = 2 * sizes.tokens * sizes.hidden / (sizes.tp if row["sp"] == "yes" else 1)
    static = (
        params * (6 + 12 / shards)
        + given["messages"] * (sizes.pp > 1) * min(sizes.chunks, 2) * message
    )
    static += given["workspace_mib"][row["gpu"].split()[0]] * MIB
    held = sum(count * (sizes.pp if at < len(layers) - 1 else 1) for at, count in enumerate(layers))
    inputs = part.inputs / (sizes.tp if row["sp"] == "yes" else 1)
    layer = (
        part.layer
        + inputs
        + (0 if row["recompute"].startswith("full") else _more(row, sizes, options, given))
    )
    logits = _logits(options, given) * sizes.tokens * sizes.vocab / sizes.tp
    peak = static + held * layer + part.outside + logits
    return {"static_gib": static / GIB, "peak_gib": peak / GIB}


def last_layers(sizes: Sizes, options: Options) -> list[int]:
    """The layers of each chunk of the last rank; an embedding and a loss that are accounted for
    are layers.
    """
    stages, layers = sizes.pp * sizes.chunks, sizes.layers
    if first := int(options.get("decoder-first-pipeline-num-layers", 0)):
        each, left = divmod(layers - first, sizes.pp - 1)
        return [int(options.get("decoder-last-pipeline-num-layers", first if left else each))]
    as_layers = [
        f"account-for-{name}-in-pipeline-split" in options for name in ("embedding", "loss")
    ]
    each, left = divmod(layers + sum(as_layers), stages)
    if left:
        raise Unsaid(f"{layers} layers in {stages} stages")
    return [*[each] * (sizes.chunks - 1), each - as_layers[1]]


def _more(row: Row, sizes: Sizes, options: Options, given: Mapping[str, Any]) -> float:
    """Bytes that Megatron keeps of a layer besides: masks of dropout, scores of attention that
    is not fused.
    """
    dropped, weights = (
        float(options.get(f"{name}-dropout", 0.1)) > 0 for name in ("hidden", "attention")
    )
    masks = 2 * dropped * sizes.tokens * sizes.hidden / (sizes.tp if row["sp"] == "yes" else 1)
    unfused = (
        options.get("attention-backend") == "unfused" or options.get("transformer-impl") == "local"
    )
    scores = sizes.tokens * int(row["seq"]) / sizes.cp * sizes.heads / sizes.tp
    return masks + unfused * scores * (given["scores"] + weights * given["dropped_scores"])


def _logits(options: Options, given: Mapping[str, Any]) -> float:
    """Bytes of each logit."""
    fused = given["fused_logits"] if "cross-entropy-loss-fusion" in options else 0
    deferred = (
        2 * int(options.get("wgrad-deferral-limit", 0))
        if "defer-embedding-wgrad-compute" in options
        else 0
    )
    return given["logits"] + fused + deferred


def _plan(row: Row, sizes: Sizes, options: Options) -> str:
    """The model alone, over tp and cp."""
    named = {
        "bias": "disable-bias-linear" not in options,
        "gated": "swiglu" in options,
        "tied": "untie-embeddings-and-output-weights" not in options,
    }
    dims = {name: getattr(sizes, name) for name in ("layers", "hidden", "ffn", "heads", "vocab")}
    text = gpt(
        {**dims, "head_dim": sizes.hidden // sizes.heads},
        [name for name, given in named.items() if given],
    )
    over = ["vocab, heads, ffn over tp"] * (sizes.tp > 1) + ["seq over tp"] * (
        sizes.tp > 1 and row["sp"] == "yes"
    )
    over = ["seq over cp as zigzag via ring"] * (sizes.cp > 1) + over
    axes = [f"{name} = {size}" for name, size in (("cp", sizes.cp), ("tp", sizes.tp)) if size > 1]
    text += f"mesh {{ {'  '.join(axes)} }}\nshard {{\n  {chr(10).join(over)}\n}}\n" if axes else ""
    batch, recompute = (
        int(row["micro_batch"]),
        "recompute = full" if row["recompute"].startswith("full") else "",
    )
    return text + train(int(row["seq"]), batch, batch, recompute)


def kind(row: Row) -> str:
    """The group of rows that a row is printed with."""
    return "experts" if row["experts"] else "dense"
