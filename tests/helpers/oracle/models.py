"""The models of plans/models in one process, plain torch, from their papers: what their emitted
programs are held to.

A model is a function from parameters and tokens, [rows, seq], to logits.  Parameters are a
dictionary by the names in emitted programs; matrices are [out, in], heads outermost in their dim.
Nothing of scalec is imported here.

Non-goals: speed, and other sizes than those of `SIZES`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from helpers.oracle.reference import Tensors
from helpers.reference_ops import (
    attention,
    gelu,
    layer_norm,
    llama3_frequencies,
    rms_norm,
    rope,
    rope_frequencies,
    silu,
    soft_cap,
)

HEADS, HIDDEN, HEAD_DIM = 4, 32, 8
SIZES = f"vocab = 32  hidden = {HIDDEN}  heads = {HEADS}  head_dim = {HEAD_DIM}  ffn = 24"
WINDOW, SCORE, CAP, LOGIT_CAP = 3, 12, 1.5, 2.0  # so that each of them matters in a sequence of 8
ROTARY = 4
TRAINED = 100  # positions: then a wavelength is kept, one is stretched, and one lies between


@dataclass(frozen=True)
class Model:
    """A model file of plans/models at a tiny size, and the function that it should be.

    `grouped`: whether it has key/value heads of a number of their own.
    """

    file: str
    dims: str
    const: str
    logits: Callable[[Tensors, Tensor], Tensor]
    grouped: bool = True


def _gptj(p: Tensors, tokens: Tensor) -> Tensor:
    """Wang and Komatsuzaki 2021; the MLP beside attention, both of one normalised input."""
    x = p["wte"][tokens]
    for layer in _stacked(p, "layers"):
        a = _layer_norm(x, layer["norm1"], layer["bias1"])
        q, k, v = (_heads(a @ layer[name].T) for name in ("wq", "wk", "wv"))
        o = _attention(_rotated_in_part(q), _rotated_in_part(k), v, HEAD_DIM)
        m = _gelu(a @ layer["w_in"].T + layer["b_in"]) @ layer["w_out"].T + layer["b_out"]
        x = x + o @ layer["wo"].T + m
    return _layer_norm(x, p["norm"], p["bias"]) @ p["head"].T + p["b_head"]


def _distilbert(p: Tensors, tokens: Tensor) -> Tensor:
    """Sanh et al. 2019; norms behind each sum, attention both ways."""
    x = _layer_norm(p["wte"][tokens] + p["wpe"], p["norm"], p["bias"], 1e-12)
    for layer in _stacked(p, "layers"):
        q, k, v = (_heads(x @ layer[f"w{of}"].T) + layer[f"b{of}"] for of in "qkv")
        o = _attention(q, k, v, HEAD_DIM, causal=False) @ layer["wo"].T + layer["bo"]
        x = _layer_norm(x + o, layer["norm1"], layer["bias1"], 1e-12)
        m = gelu(x @ layer["w_in"].T + layer["b_in"]) @ layer["w_out"].T + layer["b_out"]
        x = _layer_norm(x + m, layer["norm2"], layer["bias2"], 1e-12)
    t = _layer_norm(gelu(x @ p["w_head"].T + p["b_head"]), p["norm_head"], p["bias_head"], 1e-12)
    return t @ p["wte"].T + p["b_vocab"]


def _gpt_neox(p: Tensors, tokens: Tensor) -> Tensor:
    """Black et al. 2022; the MLP beside attention, each after a norm of its own."""
    x, frequencies = p["wte"][tokens], rope_frequencies(ROTARY, 1e4)
    for layer in _stacked(p, "layers"):
        a = _layer_norm(x, layer["norm1"], layer["bias1"])
        q, k, v = (
            (a @ layer["wqkv"].T + layer["bqkv"].flatten())
            .unflatten(-1, (HEADS, 3, HEAD_DIM))
            .unbind(-2)
        )
        o = (
            _attention(rope(q, frequencies), rope(k, frequencies), v, HEAD_DIM) @ layer["wo"].T
            + layer["bo"]
        )
        m = _layer_norm(x, layer["norm2"], layer["bias2"])
        x = x + o + gelu(m @ layer["w_in"].T + layer["b_in"]) @ layer["w_out"].T + layer["b_out"]
    return _layer_norm(x, p["norm"], p["bias"]) @ p["head"].T


def _starcoder2(p: Tensors, tokens: Tensor) -> Tensor:
    """Lozhkov et al. 2024."""
    x, frequencies = p["wte"][tokens], rope_frequencies(HEAD_DIM, 1e4)
    for layer in _stacked(p, "layers"):
        q, k, v = _queries_keys_values(layer, _layer_norm(x, layer["norm1"], layer["bias1"]))
        o = _attention(rope(q, frequencies), rope(k, frequencies), v, HEAD_DIM, WINDOW)
        x = x + o @ layer["wo"].T + layer["bo"]
        m = _layer_norm(x, layer["norm2"], layer["bias2"])
        x = x + _gelu(m @ layer["w_in"].T + layer["b_in"]) @ layer["w_out"].T + layer["b_out"]
    return _layer_norm(x, p["norm"], p["bias"]) @ p["head"].T


def _gemma(p: Tensors, tokens: Tensor) -> Tensor:
    """Gemma Team 2024, the first model."""
    x, frequencies = p["wte"][tokens] * sqrt(HIDDEN), rope_frequencies(HEAD_DIM, 1e4)
    for layer in _stacked(p, "layers"):
        q, k, v = _queries_keys_values(layer, _from_one(x, layer["norm1"]))
        x = x + _attention(rope(q, frequencies), rope(k, frequencies), v, HEAD_DIM) @ layer["wo"].T
        m = _from_one(x, layer["norm2"])
        x = x + (_gelu(m @ layer["w_gate"].T) * (m @ layer["w_up"].T)) @ layer["w_down"].T
    return _from_one(x, p["norm"]) @ p["wte"].T


def _rotated_in_part(x: Tensor) -> Tensor:
    """GPT-J's rotation of neighbours (x[2i], x[2i + 1]), after the reordering that its
    published weights differ by.
    """
    rotary, rest = x[..., :ROTARY], x[..., ROTARY:]
    neighbours = rotary.unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = torch.outer(torch.arange(x.shape[1]).double(), rope_frequencies(ROTARY, 1e4)).unsqueeze(
        1
    )
    turned = torch.view_as_complex(neighbours.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.cat([torch.view_as_real(turned).flatten(-2), rest], -1)


def _gemma2(p: Tensors, tokens: Tensor) -> Tensor:
    """Gemma Team 2024."""
    x = p["wte"][tokens] * sqrt(HIDDEN)
    for pair in _stacked(p, "pairs"):
        x = _gemma_layer(_only(pair, "l_"), x, WINDOW, 1e4, CAP)
        x = _gemma_layer(_only(pair, "g_"), x, 0, 1e4, CAP)
    return soft_cap(_from_one(x, p["norm"]) @ p["wte"].T, LOGIT_CAP)


def _gemma3(p: Tensors, tokens: Tensor) -> Tensor:
    """Gemma Team 2025."""
    x = p["wte"][tokens] * sqrt(HIDDEN)
    for block in _stacked(p, "blocks"):
        for layer in _stacked(block, "locals_"):
            x = _gemma_layer(_only(layer, "l_"), x, WINDOW, 1e4)
        x = _gemma_layer(_only(block, "g_"), x, 0, 1e6)
    for layer in _stacked(p, "rest"):
        x = _gemma_layer(_only(layer, "r_"), x, WINDOW, 1e4)
    return _from_one(x, p["norm"]) @ p["wte"].T


def _gemma_layer(p: Tensors, x: Tensor, window: int, theta: float, cap: float = 0) -> Tensor:
    a = _from_one(x, p["norm1"])
    q, k, v = (_heads(a @ p[name].T) for name in ("wq", "wk", "wv"))
    if "norm_q" in p:
        q, k = _from_one(q, p["norm_q"]), _from_one(k, p["norm_k"])
    frequencies = rope_frequencies(HEAD_DIM, theta)
    o = _attention(rope(q, frequencies), rope(k, frequencies), v, SCORE, window, cap)
    x = x + _from_one(o @ p["wo"].T, p["norm2"])
    m = _from_one(x, p["norm3"])
    m = (_gelu(m @ p["w_gate"].T) * (m @ p["w_up"].T)) @ p["w_down"].T
    return x + _from_one(m, p["norm4"])


def _from_one(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, 1 + weight, 1e-6)


def _olmo2(p: Tensors, tokens: Tensor) -> Tensor:
    """OLMo Team 2024."""
    x, frequencies = p["wte"][tokens], rope_frequencies(HEAD_DIM, 500000.0)
    for layer in _stacked(p, "layers"):
        q = rms_norm(x @ layer["wq"].T, layer["norm_q"].flatten(), 1e-6)
        k = rms_norm(x @ layer["wk"].T, layer["norm_k"].flatten(), 1e-6)
        q, k = rope(_heads(q), frequencies), rope(_heads(k), frequencies)
        o = _attention(q, k, _heads(x @ layer["wv"].T), HEAD_DIM)
        x = x + rms_norm(o @ layer["wo"].T, layer["norm1"], 1e-6)
        x = x + rms_norm(_gated(layer, x), layer["norm2"], 1e-6)
    return rms_norm(x, p["norm"], 1e-6) @ p["head"].T


def _gpt2(p: Tensors, tokens: Tensor) -> Tensor:
    """Radford et al. 2019."""
    x = p["wte"][tokens] + p["wpe"]
    for layer in _stacked(p, "layers"):
        a = _layer_norm(x, layer["norm1"], layer["bias1"])
        x = x + _attention(*_queries_keys_values(layer, a), HEAD_DIM) @ layer["wo"].T + layer["bo"]
        m = _layer_norm(x, layer["norm2"], layer["bias2"])
        x = x + _gelu(m @ layer["w_in"].T + layer["b_in"]) @ layer["w_out"].T + layer["b_out"]
    return _layer_norm(x, p["norm"], p["bias"]) @ p["wte"].T


def _llama(
    p: Tensors,
    tokens: Tensor,
    theta: float = 1e4,
    factor: float = 1,
    eps: float = 1e-5,
    window: int = 0,
    rotary: int = HEAD_DIM,
) -> Tensor:
    """Grattafiori et al. 2024; where there are biases and norms of queries and keys, Yang et
    al. 2024 and Qwen3's.
    """
    x, frequencies = p["wte"][tokens], _stretched(rope_frequencies(rotary, theta), factor)
    for layer in _stacked(p, "layers"):
        q, k, v = _queries_keys_values(layer, rms_norm(x, layer["norm1"], eps))
        if "norm_q" in layer:
            q, k = rms_norm(q, layer["norm_q"], eps), rms_norm(k, layer["norm_k"], eps)
        o = _attention(rope(q, frequencies), rope(k, frequencies), v, HEAD_DIM, window)
        x = x + o @ layer["wo"].T
        x = x + _gated(layer, rms_norm(x, layer["norm2"], eps))
    return rms_norm(x, p["norm"], eps) @ p["head" if "head" in p else "wte"].T


def _queries_keys_values(p: Tensors, x: Tensor) -> list[Tensor]:
    """By heads; with biases where there are some."""
    return [_heads(x @ p[f"w{n}"].T + (p[f"b{n}"].flatten() if f"b{n}" in p else 0)) for n in "qkv"]


def _stretched(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's."""
    return llama3_frequencies(frequencies, factor, low=1, high=4, original=TRAINED)


# ---- what they share


def _stacked(p: Tensors, name: str) -> Iterator[Tensors]:
    """The parameters of each layer of a repeat, by what is left of their names."""
    i = 0
    while layer := _only(p, f"{name}.{i}."):
        yield layer
        i += 1


def _only(p: Tensors, prefix: str) -> Tensors:
    return {
        name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)
    }


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD_DIM))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: float,
    window: int = 0,
    cap: float = 0,
    causal: bool = True,
) -> Tensor:
    """[rows, seq, heads · d] from [rows, seq, heads, d]; scores are q·k / sqrt(score)."""
    scale = 1 / sqrt(score)
    return attention(q, k, v, causal=causal, scale=scale, softcap=cap, window=window).flatten(2)


def _gated(p: Tensors, x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020)."""
    gate = x @ p["w_gate"].T
    return (silu(gate) * (x @ p["w_up"].T)) @ p["w_down"].T


def _gelu(x: Tensor) -> Tensor:
    return gelu(x, "tanh")


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return layer_norm(x, weight, bias, eps=eps)


_GEMMA = f"window = {WINDOW}  score = {SCORE}"
_LLAMA = f"theta = 10000  trained = {TRAINED}"

MODELS = (
    Model("distilbert", "turned = hidden  layers = 2", "", _distilbert, grouped=False),
    Model("gemma", "layers = 2", "", _gemma),
    Model("gemma2", "pairs = 2", f"{_GEMMA}  cap = {CAP}  logit_cap = {LOGIT_CAP}", _gemma2),
    Model("gemma3", "blocks = 2  locals = 2  rest = 1", _GEMMA, _gemma3),
    Model("gpt2", "layers = 2", "", _gpt2, grouped=False),
    Model("gpt_neox", "layers = 2", f"rotary = {ROTARY}", _gpt_neox, grouped=False),
    Model("gptj", "layers = 2", f"rotary = {ROTARY}", _gptj, grouped=False),
    Model("llama", "layers = 2", "theta = 10000", _llama),
    Model("llama3_1", "layers = 2", _LLAMA, partial(_llama, factor=8)),
    Model("llama3_2", "layers = 2", _LLAMA, partial(_llama, factor=32)),
    Model("olmo2", "layers = 2", "", _olmo2),
    Model(
        "phi3",
        "layers = 2",
        f"window = {WINDOW}  rotary = {ROTARY}",
        partial(_llama, window=WINDOW, rotary=ROTARY),
    ),
    Model("qwen2", "layers = 2", "", partial(_llama, theta=1e6, eps=1e-6)),
    Model("qwen3", "layers = 2", "", partial(_llama, theta=1e6, eps=1e-6)),
    Model("starcoder2", "layers = 2", f"theta = 10000  window = {WINDOW}", _starcoder2),
)
