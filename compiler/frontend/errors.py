"""Errors that several modules of the frontend raise, and help for names from other programs."""

from collections.abc import Iterable, Sequence

from ..ir import DATA_DIMS, MICROBATCHES
from ..syntax import tree
from ..syntax.diagnostics import did_you_mean, listing, wrong
from ..syntax.source import Span

LONGEST = 64
"""The most characters of a name."""


def check_name(name: tree.Name) -> None:
    """Names become attributes and variables; those of unnamed values begin with `_`."""
    if name.name.startswith("_") or len(name.name) > LONGEST:
        help = f"names begin with a letter and have at most {LONGEST} characters"
        raise wrong("E0215", f"`{name.name[:LONGEST]}` cannot be a name", name.span, help=help)


def check_dim(dim: tree.Name, known: Iterable[str]) -> None:
    """The model has such a dim."""
    if dim.name not in (names := sorted(known)):
        raise wrong("E0201", f"there is no dim `{dim}`", dim.span, "not a dim", did_you_mean(dim.name, names))


def check_count(results: int, names: Sequence[str], span: Span) -> None:
    """Checks that the results of a call have as many names, or one place without a name."""
    if results == len(names):
        return
    wanted = f"bound to {len(names)} names" if len(names) > 1 else "wanted as one tensor"
    given = f"{results} results" if results > 1 else "one result"
    help = f"write `{', '.join('abcdefgh'[:results])} = …`" if 1 < results < 9 else ""
    raise wrong("E0602", f"{given}, {wanted}", span, f"gives {given}", help)


def check_not_data(dim: tree.Name, what: str) -> None:
    """Parameters and repeats go over dims of the model."""
    if dim.name in (*DATA_DIMS, MICROBATCHES):
        raise wrong("E0216", f"{what} cannot go over `{dim}`", dim.span, "a dim of the data, not of the model")


_PRODUCT = (
    "a product is `x @ w[hidden -> ffn]`: `w` is declared there, by the dims that are summed over and those it gives"
)
_NO_SHAPES = "dims have names, so nothing is reshaped: `x @ wq[hidden -> heads, head_dim]` makes heads at once"
_NO_ORDER = "dims have names, and ops find them by these: leave it out"
_SQUARE = "multiply: `x * x`"
_JOIN = "write `concat(x, y, as=both)`, where `both` is a dim: `dims { both = left + right }`"
_TAKE = "write `split(x, [left, right])`, by dims of the model"

_ROUTE = (
    "write `route y to experts by top(y @ router[hidden -> experts], 2) { … }`, a statement whose braces are an expert"
)

_OPS = {
    **dict.fromkeys(("linear", "matmul", "mm", "bmm", "einsum", "dot", "dense", "conv1d"), _PRODUCT),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "rearrange"), _NO_SHAPES),
    **dict.fromkeys(("transpose", "permute", "swapaxes", "t"), _NO_ORDER),
    **dict.fromkeys(("pow", "square", "power"), _SQUARE),
    **dict.fromkeys(("cat", "concatenate", "stack", "hstack"), _JOIN),
    **dict.fromkeys(("chunk", "slice", "narrow", "unbind", "gather"), _TAKE),
    **dict.fromkeys(
        ("scaleddotproductattention", "sdpa", "multiheadattention", "flashattention", "selfattention"),
        "write `attention(q, k, v, mask=causal)`, of queries, keys and values with heads",
    ),
    **dict.fromkeys(("route", "router", "top", "topk", "moe", "experts", "mixtureofexperts", "sparsemoe"), _ROUTE),
    "swish": "it is called `silu`",
    "swiglu": "write `silu(x @ w_gate[hidden -> ffn]) * (x @ w_up[hidden -> ffn])`",
    "geglu": "write `gelu(x @ w_gate[hidden -> ffn]) * (x @ w_up[hidden -> ffn])`",
    "logsoftmax": "`cross_entropy` takes logits as they are",
    "nllloss": "write `cross_entropy(logits, labels)`, of logits as they are",
    "rotary": "it is called `rope`",
    "sqrt": "`sqrt` takes numbers: dims and constants",
    "print": "a plan prints nothing; `scalec ir` shows each value with its dims",
}
"""Ops that a plan has by another name or not at all, in lower case and without underscores."""

_ARGUMENTS = {
    **dict.fromkeys(("dim", "axis", "dims"), "dims go by name, as in `over=hidden`"),
    **dict.fromkeys(("is_causal", "causal", "attn_mask", "attention_mask"), "write `mask=causal` or `mask=full`"),
    **dict.fromkeys(("inplace", "training", "keepdim", "out", "dtype"), "leave it out"),
    "reduction": "leave it out: a loss is the sum over tokens, which the step divides by their number",
    "ignore_index": "leave it out: labels below 0 are ignored",
    "bias": "write `… + b[ffn]`",
    "enable_gqa": "leave it out: each key/value head serves the same number of query heads",
    "base": "it is called `theta`",
}

_VALUES = {
    "None": "there is no `None`: arguments with a default may be left out",
    **dict.fromkeys(("True", "False", "true", "false"), "no setting or argument is true or false: choices have names"),
    **dict.fromkeys(("input_ids", "inputs", "input", "ids"), "the model's inputs are called `tokens` and `labels`"),
    **dict.fromkeys(("targets", "target"), "the model's inputs are called `tokens` and `labels`"),
    **dict.fromkeys(("positions", "position_ids", "pos"), "learned positions are a parameter: `x + wpe[seq, hidden]`"),
}


def op_elsewhere(name: str, known: Iterable[str]) -> str:
    """How a plan writes the op that is called `name` elsewhere, or else the ops there are."""
    plain = {each.replace("_", ""): each for each in known}
    word = name.lower().replace("_", "")
    if word in plain:
        return f"did you mean `{plain[word]}`?"
    return _OPS.get(word) or did_you_mean(name, plain.values()) or f"ops are {listing(sorted(plain.values()))}"


def argument_elsewhere(name: str, known: Iterable[str]) -> str:
    """How a plan writes the argument that is called `name` elsewhere; "" where it is like none."""
    places = list(known)
    return did_you_mean(name, places) or _ARGUMENTS.get(name, "")


def value_elsewhere(name: str) -> str:
    """The plan's way to write a value or an input of Python's; "" for any other name."""
    return _VALUES.get(name, "")
