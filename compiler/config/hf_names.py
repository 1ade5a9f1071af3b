"""`names hf { … }`: where Hugging Face files hold each parameter of a model.

The section's entries as values, read from syntax and shown as plan text.  An expression is read
from the inside out: `part(transposed("h.{i}.attn.c_attn.weight"), 0, 3)` is the first of three
equal parts along the first dim, of that tensor transposed.  `interleaved("h.{i}.q.weight", 64)` has
the first 64 rows of each head pair by pair, (0, 1), (2, 3), …, as GPT-J needs them, which rotates
neighbours (Wang and Komatsuzaki 2021); with `from=128` the 64 rows from row 128 on, as DeepSeek-V3
does (DeepSeek-AI 2024).  `"h.{i}.experts.{experts}.up.weight"` has a tensor for each of the
`experts`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from attrs import evolve, field, frozen

from ..syntax.diagnostics import Diagnostics, PlanError, wrong
from ..syntax.source import Span
from ..syntax.tree import Call, Entry, Expr, Name, Number, Section, Setting, String

INDICES = ("i", "j")
"""Indices in braces in a tensor's name: of the outermost repeat that has the parameter, and of the
repeat in it.

The name of a dim of experts is the index along it.
"""

_TERM = r"(?:(?:[0-9]{1,4}\*)?[ij]|[0-9]{1,4})"
_INDEX = rf"\{{{_TERM}(?:\+{_TERM})*\}}"
_DIM = r"\{([A-Za-z_]\w*)\}"
_TENSOR = re.compile(rf"(?:[A-Za-z0-9_.-]|{_INDEX}|{_DIM})+")
_FORMS = (
    '`"…"`, `transposed("…")`, `part("…", 0, 3)`, `interleaved("…", 64)` or, of all, '
    '`interleaved(part(transposed("…"), 0, 3), 64)`'
)

Numbers = Mapping[str, int | float | Fraction]
"""Names and values of a plan's dims and constants."""


@frozen
class HFWeight:
    """A parameter is part number `part` of `parts` of a tensor, or of its transpose.

    In the file, as many rows of each head as `interleaved` says, from row `skipped` on, are
    interleaved pairs.
    """

    param: str
    tensor: str
    is_transposed: bool = False
    part: int = 0
    parts: int = 1
    interleaved: int = 0
    skipped: int = 0
    span: Span = field(eq=False, repr=False, kw_only=True)

    @property
    def indices(self) -> tuple[str, ...]:
        """The indices in the tensor's name: of repeats, then of dims."""
        expressions = "".join(re.findall(_INDEX, self.tensor))
        indices = [index for index in INDICES if index in expressions]
        for dim in dict.fromkeys(re.findall(_DIM, self.tensor)):
            if dim not in INDICES:
                indices.append(dim)
        return tuple(indices)


def parse_names(
    section: Section, diagnostics: Diagnostics, numbers: Numbers
) -> tuple[HFWeight, ...]:
    """The entries of `names hf { … }`, with dims and constants from `numbers`; mistakes are
    added to `diagnostics`.
    """
    if not section.name or section.name.name != "hf":
        message, help = "`names` needs the form of the files", "write `names hf { … }`"
        diagnostics.error("E0406", message, section.head, help=help)
    weights: dict[str, HFWeight] = {}
    for entry in section.entries:
        try:
            weight = _entry(entry, numbers)
        except PlanError as error:
            diagnostics.add(error)
            continue
        if weight.param in weights:
            message = f"`{weight.param}` is given twice"
            diagnostics.error("E0403", message, weight.span, "repeated")
        weights[weight.param] = weight
    return tuple(weights.values())


def move_indices(stored: HFWeight, starts: Sequence[int]) -> HFWeight:
    """The entry of a parameter whose repeats, outermost first, begin at these indices of the
    file's.
    """
    if not any(starts):
        return stored
    begin: dict[str, int] = dict(zip(INDICES, starts, strict=False))

    def move_index(match: re.Match[str]) -> str:
        """An index such as `{2*i+1}`, with the beginnings of its repeats added to its number."""
        terms, offset = list[str](), 0
        for term in match[0][1:-1].split("+"):
            if term[-1] in INDICES:
                terms.append(term)
                offset += int(term[:-2] or 1) * begin.get(term[-1], 0)
            else:
                offset += int(term)
        if offset or not terms:
            terms.append(str(offset))
        return f"{{{'+'.join(terms)}}}"

    return evolve(stored, tensor=re.sub(_INDEX, move_index, stored.tensor))


def show_names(names: Iterable[HFWeight]) -> str:
    """The section as plan text, which reads back to equal entries."""
    lines = ["names hf {"]
    for weight in names:
        text = f'"{weight.tensor}"'
        if weight.is_transposed:
            text = f"transposed({text})"
        if weight.parts > 1:
            text = f"part({text}, {weight.part}, {weight.parts})"
        if weight.interleaved:
            skipped = f", from={weight.skipped}" if weight.skipped else ""
            text = f"interleaved({text}, {weight.interleaved}{skipped})"
        lines.append(f"  {weight.param} = {text}")
    return "\n".join([*lines, "}"])


def _entry(entry: Entry, numbers: Numbers) -> HFWeight:
    match entry:
        case Setting(key, Call(Name("interleaved"), (tensor, rows), ())):
            weight = _part(key.name, tensor, entry.span)
            return evolve(weight, interleaved=_rows(rows, numbers, *_PAIRS))
        case Setting(
            key, Call(Name("interleaved"), (tensor, rows), (Setting(Name("from"), skipped),))
        ):
            weight = _part(key.name, tensor, entry.span)
            return evolve(
                weight,
                interleaved=_rows(rows, numbers, *_PAIRS),
                skipped=_rows(skipped, numbers, *_SKIPPED),
            )
        case Setting(key, value):
            return _part(key.name, value, entry.span)
        case _:
            span = entry.head if isinstance(entry, Section) else entry.span
            raise _wrong("E0406", "`names` has settings only", span)


_PAIRS, _SKIPPED = (2, "are no pairs"), (1, "cannot be skipped")


def _rows(expr: Expr, numbers: Numbers, least: int, otherwise: str) -> int:
    """A number of rows, or the name of one, in multiples of the `least`."""
    match expr:
        case Number(value, ""):
            rows = value
        case Name(name) if name in numbers:
            rows = numbers[name]
        case other:
            raise _wrong("E0404", "this is not a number of rows", other.span)
    if rows < least or rows % least:
        raise _wrong("E0405", f"{rows} rows {otherwise}", expr.span)
    return int(rows)


def _part(param: str, expr: Expr, span: Span) -> HFWeight:
    match expr:
        case Call(Name("part"), (whole, Number(int() as part, ""), Number(int() as parts, "")), ()):
            if not part < parts:
                message = f"parts of {parts} are counted from 0 to {parts - 1}"
                raise _wrong("E0405", message, expr.span)
            return evolve(_whole(param, whole, span), part=part, parts=parts)
        case whole:
            return _whole(param, whole, span)


def _whole(param: str, expr: Expr, span: Span) -> HFWeight:
    match expr:
        case Call(Name("transposed"), (String(tensor, place),), ()):
            return HFWeight(param, _tensor(tensor, place), True, span=span)
        case String(tensor, place):
            return HFWeight(param, _tensor(tensor, place), span=span)
        case other:
            raise _wrong("E0404", "this does not name a stored tensor", other.span)


def _tensor(name: str, span: Span) -> str:
    if not _TENSOR.fullmatch(name):
        indices = (
            "`{i}` or `{2*i+1}` for the index of a repeat, `{j}` for that of one in it,"
            " `{experts}` for an expert's"
        )
        help = f"letters, digits, `_.-`, and {indices}"
        raise wrong("E0405", f"`{name}` cannot be a tensor's name", span, help=help)
    return name


def _wrong(code: str, message: str, span: Span) -> PlanError:
    return wrong(code, message, span, help=f"write {_FORMS}")
