"""Words of emitted programs: identifiers, literals, shape comments.

Nothing of a plan becomes code.  Names are identifiers by the grammar and are kept apart from
Python's; everything else is a literal.
"""

import builtins
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from hashlib import sha256
from itertools import accumulate, chain
from pathlib import PurePath
from textwrap import wrap

from ..ir import BATCH, SEQUENCE, Kind, Program, Type
from ..ops.call import Experts, Layout, PositionIds
from ..syntax.source import Span
from .imports import IMPORTS

WIDTH = 120
"""The columns of a line."""

LETTERS = {
    BATCH: "b",
    SEQUENCE: "s",
    "hidden": "h",
    "heads": "n",
    "kv_heads": "k",
    "head_dim": "d",
    "ffn": "f",
    "vocab": "v",
}
"""The field's shape letters; other dims go by their own names."""

DTYPES = {
    "f16": "torch.float16",
    "bf16": "torch.bfloat16",
    "f32": "torch.float32",
    "f64": "torch.float64",
    "i64": "torch.int64",
}

PROGRAM = set(
    """
        DTensor DeviceMesh FIRST GLOBAL_BATCH INNER LAST LAYERS_OF_STAGE MESH MICROBATCHES NAMES
        PIPELINE PLAN Partial Replicate SEED STAGE_TO_RANK STEPS Sequence Shard TILES Tensor batch
        build cast eval_step lr mesh model nn optimizer partial reduce self state torch train_step
    """.split()
)
"""Names that emitted programs give meaning to."""

MODULE = set(
    """
        T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda
        double dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
        get_submodule half ipu load_state_dict modules mtia named_buffers named_children
        named_modules named_parameters parameters register_backward_hook register_buffer
        register_forward_hook register_forward_pre_hook register_full_backward_hook
        register_full_backward_pre_hook register_load_state_dict_post_hook
        register_load_state_dict_pre_hook register_module register_parameter
        register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
        set_submodule share_memory state_dict to to_empty train training type xpu zero_grad
    """.split()
)
"""Attributes of `torch.nn.Module` (2.13)."""

TAKEN = {
    *chain.from_iterable(IMPORTS.values()),
    *PROGRAM,
    *MODULE,
    *keyword.kwlist,
    *keyword.softkwlist,
    *dir(builtins),
    *"lOI",
}
"""Names that no value, class or attribute of a module takes; linters take l, O and I for digits."""


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


def layers_word(dim: str) -> str:
    """The constant with each stage's layers of a repeat."""
    return f"LAYERS_OF_STAGE[{literal(dim)}]"


def stage_word(stage: int, stages: int) -> str:
    """The number of a stage; the last one has a name of its own."""
    return {0: "FIRST", stages - 1: "LAST"}.get(stage, str(stage))


def singular(name: str) -> str:
    """`layers` → `layer`, `layers_0` → `layer_0`."""
    stem, _, number = name.rpartition("_")
    if stem and number.isdecimal():
        return f"{singular(stem)}_{number}"
    if name.endswith("s") and not name.endswith("ss") and len(name) > 1:
        return name[:-1]
    return name


MANY_DIGITS = 12
"""The digits from which on no person has typed a number."""


def literal(value: object) -> str:
    """A Python literal in the quotes that formatters prefer."""
    if isinstance(value, str):
        needs_single_quotes = '"' in value and "'" not in value
        return repr(value) if needs_single_quotes else json.dumps(value)
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))  # type: ignore[arg-type]
        return f"({inner},)" if len(value) == 1 else f"({inner})"  # type: ignore[arg-type]
    return _number(value) if isinstance(value, float) else repr(value)


def _number(value: float) -> str:
    """A float as people write it: `1e-5`, `3e-4`, `0.02`, `10_000.0`, `1152**0.5`."""
    digits = repr(value).replace("e+", "e")
    if root := _of_root(value):
        return root
    if abs(value) >= 1:
        needs_underscores = "e" not in digits and abs(value) >= 10_000
        return f"{value:_}" if needs_underscores else digits
    short = f"{Decimal(digits):e}"
    return short if len(short) < len(digits) else digits


def _of_root(value: float) -> str:
    """A root, or a number divided by one, that is exactly this number; "" where no person would
    write one.
    """
    if not 1e-4 < value < 1e6:
        return ""
    inverse = round(value**-2)
    if inverse >= 128 and inverse.bit_count() == 1 and inverse**-0.5 == value:
        return f"{inverse}**-0.5"
    if len(repr(value)) <= MANY_DIGITS:
        return ""
    if (square := round(value * value)) ** 0.5 == value:
        return f"{square}**0.5"
    for numerator in (1, 0.02):  # initial values are often a part of 0.02
        number = round((numerator / value) ** 2) or 1
        if number**0.5 % 1 and numerator / number**0.5 == value:
            return f"{numerator} / {number}**0.5"
    return ""


def quotient(value: float, divisor: int) -> str:
    """A number as `1e-4 / 15360`, where that is exactly the number, and shorter."""
    numerator = float(f"{value * divisor:.{MANY_DIGITS}g}")
    division, number = f"{literal(numerator)} / {divisor}", literal(value)
    if numerator / divisor == value and len(division) < len(number):
        return division
    return number


def call(function: str, arguments: Sequence[str], indent: int, after: int = 1) -> str:
    """A call on one line if it fits with `after` more characters, else an argument a line, as
    formatters do.
    """
    line = f"{function}({', '.join(arguments)})"
    if "\n" not in line and indent + len(line) + after <= WIDTH:
        return line
    return explode(function, arguments, indent)


def fill_lines(before: str, entries: Sequence[str], indent: int) -> str:
    """A tuple on one line if it fits, else with as many entries on each line as fit.

    The tuple of a pipeline has an entry for each stage, and there may be many.
    """
    line = call(before, entries, indent)
    if "\n" not in line:
        return line
    pad = " " * indent
    # a zero byte keeps `wrap` from breaking a line inside of an entry
    text = ", ".join(entry.replace(" ", "\0") for entry in entries) + ","
    rows = [f"{pad}    {row}" for row in wrap(text, WIDTH - indent - 4)]
    return "\n".join([f"{before}(", *rows, f"{pad})"]).replace("\0", " ")


def explode(function: str, arguments: Sequence[str], indent: int) -> str:
    """A call with an argument a line."""
    pad = " " * indent
    lines = [f"{pad}    {argument}," for argument in arguments]
    return "\n".join([f"{function}(", *lines, f"{pad})"])


def companion_call(function: str, file: Mapping[str, str], indent: int = 4) -> str:
    """The call that reads a file beside the program, name → text, by its hash."""
    ((name, text),) = file.items()
    hashed = literal(sha256(text.encode()).hexdigest())
    return explode(function, [literal(name), "beside=__file__", f"sha256={hashed}"], indent)


def fit_line(code: str, indent: int) -> str:
    """A line that is one call, or opens a block with one, cut so that it fits.

    Its arguments have a line of their own if need be, or each has one.
    """
    call, end, names = code, "", ""
    if code.startswith("with "):
        call, end, names = code.rpartition(" as ")
    function, _, arguments = call.partition("(")
    if "\n" in code or indent + len(code) <= WIDTH or not _closes_last(arguments):
        return code
    pad = " " * indent
    if indent + 3 + len(arguments) > WIDTH:
        return explode(function, _apart(arguments[:-1]), indent) + end + names
    return f"{function}(\n{pad}    {arguments[:-1]}\n{pad}){end}{names}"


def _apart(arguments: str) -> list[str]:
    """The arguments of a call, each by itself."""
    parts, depth, start = list[str](), 0, 0
    for i, character in enumerate(arguments):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(arguments[start:i].strip())
            start = i + 1
    return [*parts, arguments[start:].strip()]


def _closes_last(arguments: str) -> bool:
    """Whether nothing but the last parenthesis closes the one before these arguments."""
    depths = accumulate({"(": 1, ")": -1}.get(character, 0) for character in arguments)
    return -1 not in [*depths][:-1] and arguments.endswith(")")


def letter(dim: str) -> str:
    """A dim in a shape comment."""
    return LETTERS.get(dim, dim)


def axes_word(axes: tuple[str, ...], program: Program) -> str:
    """The name of a group of axes: factors that make up an axis of the plan go by its name."""
    words: list[str] = []
    for name in axes:
        parent = program.axis(name).parent
        factors = {axis.name for axis in program.axes if axis.parent == parent}
        words.append(parent if factors <= set(axes) else name)
    return "_".join(dict.fromkeys(words))


def layout_stem(layout: Layout) -> str:
    """The stem of the attribute that holds a layout."""
    if isinstance(layout, PositionIds):
        return f"{layout.dim}_positions"
    return type(layout).__name__.lower()


def layout(layout: Layout, program: Program, sizes: Mapping[str, str]) -> str:
    """The positions or the experts that a rank holds; `sizes` are names of dims' sizes."""
    dim = layout.dim
    arguments = ["mesh", sizes.get(dim, str(program.size(dim))), *map(literal, layout.axes)]
    if isinstance(layout, Experts):
        if layout.tokens:
            arguments.append(f"tokens={literal(layout.tokens)}")
    elif zigzag := program.zigzag_axes(dim, layout.axes):
        arguments.append(f"zigzag={literal(zigzag)}")
    function = "position_ids" if isinstance(layout, PositionIds) else type(layout).__name__
    return f"{function}({', '.join(arguments)})"


def shape(type: Type, program: Program) -> str:
    """For instance `[s/tp, b, h] partial over tp`."""
    sizes = list[str]()
    for dims in program.dims_in_memory(type):
        sizes.append("rows" if dims[1:] else _size_word(dims[0], type, program))
    text = f"[{', '.join(sizes)}]"
    if axes := type.axes_in(Kind.PARTIAL):
        text += f" partial over {axes_word(axes, program)}"
    if axes := type.axes_in(Kind.MAXIMUM):
        text += f" maximal over {axes_word(axes, program)}"
    return text


def matrix_shape(type: Type, inner: int, program: Program) -> str:
    """A parameter's shape with its outer and inner dims joined: `[n*d/tp, h]`."""
    words = [_size_word(dim, type, program) for dim in type.dims]
    if not inner:
        return f"[{', '.join(words)}]"
    parts = ["*".join(words[:-inner]), "*".join(words[-inner:])]
    return f"[{', '.join(filter(None, parts))}]"


def _size_word(dim: str, type: Type, program: Program) -> str:
    """The dim's letter, over the axes of the plan that shard it.

    `b` is a rank's own batch, as inputs have it.
    """
    axes, dim = type.axes_of(dim), program.dim(dim).twin or dim
    word = letter(dim)
    if dim == BATCH:
        input_axes = program.region.args[0].value.type.axes_of(dim)
        if axes == input_axes:
            return word
        if input_axes and not axes:  # the batches of all ranks together
            word += f"*{axes_word(input_axes, program)}"
    return f"{word}/{axes_word(axes, program)}" if axes else word


UNFIT = r"[^\w.\-/ ]"
"""The characters that no comment and no docstring has."""


def place(span: Span) -> str:
    """The plan line of a span, fit for a comment."""
    return f"{re.sub(UNFIT, '_', span.file)}:{span.line}"


def run_word(path: str) -> str:
    """The name of a plan's runs: its file's name without ending, fit for a folder."""
    return PurePath(file_word(path)).stem.strip(".") or "plan"


def file_word(path: str) -> str:
    """A file's name, fit for a comment or a docstring."""
    return re.sub(UNFIT, "_", PurePath(path).name)
