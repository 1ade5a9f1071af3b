"""Words of emitted programs: identifiers, literals, shape comments.

Nothing of a plan becomes code: names are identifiers by the grammar and kept apart from Python's, all else is a
literal.
"""

import json
import keyword
import re
from pathlib import PurePath

from ..ir import Kind, Program, Type
from ..source import Span

LETTERS = {
    "batch": "b",
    "seq": "s",
    "hidden": "h",
    "heads": "n",
    "kv_heads": "k",
    "head_dim": "d",
    "ffn": "f",
    "vocab": "v",
}
"""The field's shape letters; other dims stand under their own names."""

DTYPES = {"f32": "torch.float32", "f64": "torch.float64", "bf16": "torch.bfloat16"}

RUNTIME = (
    *(
        "SGD",
        "AdamW",
        "Batch",
        "Constant",
        "Cosine",
        "Group",
        "Input",
        "Mesh",
        "Metrics",
        "Plan",
        "State",
        "Text",
        "Tokens",
    ),
    *("all_gather", "all_gather_invariant", "all_reduce", "all_reduce_", "all_to_all", "attention", "clip_scale"),
    *(
        "count_valid",
        "cross_entropy",
        "embedding",
        "invariant",
        "max_logit",
        "normal",
        "once",
        "once_replicated",
        "ones",
    ),
    *(
        "pad_shard",
        "reduce_scatter",
        "regather",
        "replicate",
        "rms_norm",
        "rope",
        "rope_table",
        "shard",
        "softmax_parts",
    ),
    *("sum_squares", "take_shard", "token_loss", "train", "weight", "zeros"),
)
"""What `scalec.runtime` offers emitted programs, in the order in which imports stand."""

TAKEN = {
    *RUNTIME,
    *keyword.kwlist,
    *keyword.softkwlist,
    *("linear", "silu", "part"),
    *(
        "self",
        "mesh",
        "torch",
        "nn",
        "Tensor",
        "state",
        "model",
        "batch",
        "lr",
        "rotary",
        "os",
        "range",
        "super",
        "dict",
    ),
    *(
        "tuple",
        "print",
        "forward",
        "training",
        "children",
        "parameters",
        "modules",
        "buffers",
        "apply",
        "train",
        "eval",
    ),
    *(
        "to",
        "type",
        "float",
        "double",
        "half",
        "bfloat16",
        "cpu",
        "cuda",
        "compile",
        "share_memory",
        "state_dict",
        "zero_grad",
    ),
    *(
        "requires_grad_",
        "call_super_init",
        "dump_patches",
        "extra_repr",
        "named_parameters",
        "named_modules",
        "register_buffer",
    ),
}
"""Names that a value or an attribute of a module must not take."""


def identifier(name: str, taken: set[str]) -> str:
    """`name` without its number and underscore, changed where it is taken."""
    stem = name.split(".")[0].lstrip("_") or "value"
    stem = f"{stem}_" if stem in TAKEN else stem
    candidate, number = stem, 2
    while candidate in taken:
        candidate, number = f"{stem}_{number}", number + 1
    return candidate


def class_name(name: str) -> str:
    """`tiny_llama` → `TinyLlama`."""
    words = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{words}Module" if words in TAKEN else words


def singular(name: str) -> str:
    """`layers` → `layer`."""
    return name[:-1] if name.endswith("s") and not name.endswith("ss") and len(name) > 1 else name


def literal(value: object) -> str:
    """A Python literal in the quotes that formatters prefer."""
    if isinstance(value, str):
        return repr(value) if '"' in value and "'" not in value else json.dumps(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))  # type: ignore[arg-type]
        return f"({inner},)" if len(value) == 1 else f"({inner})"  # type: ignore[arg-type]
    return repr(value)


def letter(dim: str) -> str:
    """A dim in a shape comment."""
    return LETTERS.get(dim, dim)


def axes_word(axes: tuple[str, ...], program: Program) -> str:
    """The name of a group of axes: factors that make up an axis of the plan go by its name."""
    words: list[str] = []
    for name in axes:
        whole = program.axis(name).whole
        complete = {a.name for a in program.axes if a.whole == whole} <= set(axes)
        words.append(whole if complete else name)
    return "_".join(dict.fromkeys(words))


def shape(type: Type, program: Program) -> str:
    """For instance `[s/tp, b, h] partial over tp`."""
    inner = ", ".join(_sized(dim, type, program) for dim in type.dims)
    pending = [axis for kind in (Kind.PARTIAL, Kind.MAXIMUM) for axis in type.axes_in(kind)]
    return f"[{inner}]" + (f" partial over {axes_word(tuple(pending), program)}" if pending else "")


def matrix_shape(type: Type, inner: int, program: Program) -> str:
    """A parameter's shape with its outer and inner dims joined: `[n*d/tp, h]`."""
    cut = len(type.dims) - inner
    rows, columns = (type.dims[:cut], type.dims[cut:]) if inner else (type.dims, ())
    joined = "*" if inner else ", "
    parts = [joined.join(_sized(dim, type, program) for dim in part) for part in (rows, columns) if part]
    return f"[{', '.join(parts)}]"


def _sized(dim: str, type: Type, program: Program) -> str:
    """The dim's letter, over the axes of the plan that shard it; batch is a rank's own part, so it stands alone."""
    axes = type.axes_of(dim)
    return letter(dim) if dim == "batch" or not axes else f"{letter(dim)}/{axes_word(axes, program)}"


def place(span: Span) -> str:
    """The plan line of a span, fit for a comment."""
    return f"{file_word(span.path)}:{span.line}"


def file_word(path: str) -> str:
    """A file's name, fit for a comment or a docstring."""
    return re.sub(r"[^\w.\- ]", "_", PurePath(path).name)
