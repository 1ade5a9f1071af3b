"""Reads plan text into its syntax tree."""

import math
import re
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, TypeVar

from attrs import evolve, frozen
from lark import Token, Transformer
from lark.exceptions import UnexpectedInput

from . import tree
from .diagnostics import Diagnostic, PlanError, relocate, wrong
from .lark_parser import parser
from .limits import check, pairing
from .recovery import (
    Part,
    blank_out,
    block_below,
    entry_around,
    find_unpaired_part,
    line_around,
    offset,
    words,
)
from .source import Source, Span
from .syntax_errors import explain, explain_habit, place_of

MAX_DIGITS = 20

_NUMBER = re.compile(r"([0-9_]+)(\.[0-9_]+)?([eE][+-]?[0-9]+)?(.*)")
_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t"}

T = TypeVar("T")
Parts = list[Any]
"""Tokens and nodes of one rule, as written."""


MOST = 20
"""The most mistakes after which a text is read on."""


@frozen
class Read:
    """A text as far as it is a plan: the part that could be read, the mistakes, the words of the
    parts that could not be read, and the words of the blocks around these parts.
    """

    plan: tree.Plan
    mistakes: tuple[Diagnostic, ...] = ()
    doubtful: frozenset[str] = frozenset()
    in_part: frozenset[str] = frozenset()


def parse_plan(source: Source) -> tree.Plan:
    """The syntax tree of a plan.  Raises PlanError with all its mistakes of syntax."""
    read = parse_with_mistakes(source)
    if read.mistakes:
        raise PlanError(read.mistakes)
    return read.plan


@lru_cache(maxsize=16)
def parse_with_mistakes(source: Source) -> Read:
    """A plan without the entries that have mistakes of syntax.

    Raises PlanError where it is beyond the limits.
    """
    check(source)
    if source.text.lstrip().startswith("{"):
        help = "`scalec import config.json -o mine.scale` writes a plan for a model of Hugging Face"
        raise wrong(
            "E0104", "this looks like JSON, and no plan begins so", source.whole(), help=help
        )
    try:
        if not pairing(source):
            return Read(_builder().parse(source, source.text))
    except (UnexpectedInput, PlanError):
        pass
    return _Reader(source).get_result()


class _Reader:
    """Reads a text that has mistakes; after each one it leaves a part out and begins once more."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._left = source  # the text without the parts that are left out
        self._mistakes: list[Diagnostic] = []
        self._doubtful: set[str] = set()
        self._in_part: set[str] = set()

    def get_result(self) -> Read:
        for _ in range(MOST):
            if mistake := pairing(self._left):
                self._pair(mistake)
                continue
            try:
                return self._as(_builder().parse(self._source, self._left.text))
            except UnexpectedInput as error:
                self._leave_out(explain(error, self._left), self._entry(place_of(error)))
            except PlanError as error:
                mistake = error.diagnostics[0]
                self._leave_out(mistake, self._entry(offset(mistake.span)))
        return self._as(tree.Plan((), self._source.whole()))

    def _pair(self, mistake: Diagnostic) -> None:
        """Leaves out the part that does not pair, or the habit of another language that is the
        reason.
        """
        text, part = self._left.text, find_unpaired_part(self._left, mistake)
        error = self._error(text)
        habit = explain_habit(error, self._left) if isinstance(error, UnexpectedInput) else None
        if habit:
            line = block_below(text, line_around(text, offset(habit.span)))
            start, end = line
            has_mistake = start <= offset(mistake.span) < end
            if has_mistake or not pairing(evolve(self._left, text=blank_out(text, line))):
                mistake, part = habit, (min(part[0], start), max(part[1], end))
        self._leave_out(mistake, part)

    def _as(self, plan: tree.Plan) -> Read:
        return Read(
            plan, tuple(self._mistakes), frozenset(self._doubtful), frozenset(self._in_part)
        )

    def _leave_out(self, mistake: Diagnostic, part: Part) -> None:
        self._mistakes.append(relocate(mistake, self._source.text))
        unread = words(self._left.text, part)
        self._doubtful |= unread
        self._in_part |= unread
        self._left = evolve(self._left, text=blank_out(self._left.text, part))

    def _entry(self, stop: int) -> Part:
        """The entry where the parser stopped; the words of the blocks around it are in doubt."""
        stack = _builder().stack(self._source, self._left.text)
        self._in_part |= {str(part) for part in stack if isinstance(part, Token | tree.Name)}
        return block_below(self._left.text, entry_around(self._left.text, stop, stack, self._reach))

    def _reach(self, text: str) -> int:
        """The offset where the parser stops in a text."""
        match self._error(text):
            case None:
                return len(text) + 1
            case PlanError() as error:
                return offset(error.diagnostics[0].span)
            case error:
                return place_of(error)

    def _error(self, text: str) -> UnexpectedInput | PlanError | None:
        """The first mistake of a text, if any."""
        try:
            _builder().parse(self._source, text)
        except (UnexpectedInput, PlanError) as error:
            return error
        return None


STAGES = {
    0: (),
    1: ("optimizer",),
    2: ("gradients", "optimizer"),
    3: ("parameters", "gradients", "optimizer"),
}
"""The state that each stage of ZeRO shards."""


class _Builder(Transformer[Token, tree.Plan]):
    """Called while parsing, so that nothing recurses over trees."""

    def __init__(self) -> None:
        super().__init__()
        self._parser = parser("plan", self)
        self._source = Source("", "")

    def parse(self, source: Source, text: str) -> tree.Plan:
        """The syntax tree of a text, with places in `source`.

        Raises UnexpectedInput, or PlanError.
        """
        self._source = source
        return self._parser.parse(text)  # type: ignore[return-value]

    def stack(self, source: Source, text: str) -> Parts:
        """The tokens and nodes that the parser has put together when it stops, in their order."""
        self._source = source
        state: Any = self._parser.parse_interactive(text)  # type: ignore[reportUnknownMemberType]
        with suppress(UnexpectedInput, PlanError):
            state.exhaust_lexer()
        return state.parser_state.value_stack

    def start(self, parts: Parts) -> tree.Plan:
        return tree.Plan(tuple(parts), self._source.whole())

    def use(self, parts: Parts) -> tree.Use:
        _, path, *remainder = parts
        return tree.Use(path, _only(tree.Section, remainder), self._span(parts))

    def model(self, parts: Parts) -> tree.Model:
        _, name, *remainder = parts
        kinds = tree.Section | tree.Init | tree.Statement
        body = tuple(part for part in remainder if isinstance(part, kinds))
        sees = tuple(str(part) for part in remainder if _is(part, "SEES"))
        return tree.Model(name, _only(tree.Input, remainder), sees, body, self._span(parts))

    def input(self, parts: Parts) -> tree.Input:
        return tree.Input(parts[0], parts[2], self._span(parts))

    def init(self, parts: Parts) -> tree.Init:
        _, *names, _, dist = parts
        return tree.Init(names[0] if names else (), dist, self._span(parts))

    def bind(self, parts: Parts) -> tree.Bind:
        names, _, expr = parts
        return tree.Bind(names, expr, self._span([*names, expr]))

    def repeat(self, parts: Parts) -> tree.Repeat:
        dim, *body = _nodes(parts)
        index = None
        if _is(parts[2], "AS"):
            index, *body = body
        return tree.Repeat(dim, tuple(body), self._span(parts), index)

    def branch(self, parts: Parts) -> tree.If:
        _, index, _, end, *blocks = parts
        else_place = len(blocks)
        for place, part in enumerate(blocks):
            if _is(part, "ELSE"):
                else_place = place
                break
        then, otherwise = _nodes(blocks[:else_place]), _nodes(blocks[else_place:])
        return tree.If(index, end, then, otherwise, self._span(parts))

    def route(self, parts: Parts) -> tree.Route:
        value, dim, by, *body = _nodes(parts)
        return tree.Route(value, dim, by, tuple(body), self._span(parts))

    def user_op(self, parts: Parts) -> tree.UserOp:
        name, *remainder, function = _nodes(parts)
        operands = _only(tree.UserOperand, remainder)
        positions = _only(tree.UserPositions, remainder)
        causal = next(iter(_only(tree.Name, remainder)), None)
        # the results and the dims along which the op works have no class of their own
        with_class = tree.UserOperand | tree.UserPositions | tree.Name
        *gives, along = (part for part in remainder if not isinstance(part, with_class))
        is_deterministic = _is(parts[-1], "DETERMINISTIC")
        return tree.UserOp(
            name,
            operands,
            positions,
            tuple(gives),
            along,
            causal,
            function,
            is_deterministic,
            self._span(parts),
        )

    def positions(self, parts: Parts) -> tree.UserPositions:
        keyword, _, dim = parts
        return tree.UserPositions(keyword, dim, self._span(parts))

    def causal(self, parts: Parts) -> tree.Name:
        return parts[1]

    def result(self, parts: Parts) -> tuple[tree.Name, ...]:
        return parts[1]

    def operand(self, parts: Parts) -> tree.UserOperand:
        name, *dims = _nodes(parts)
        return tree.UserOperand(
            name, dims[0] if dims else (), parts[0] is not name, self._span(parts)
        )

    def dims(self, parts: Parts) -> tuple[tree.Name, ...]:
        dims: list[tree.Name] = []
        first = parts[0] if parts else None
        if isinstance(first, Token):
            dims.append(tree.Name(str(first), self._place(first)))
        for names in _nodes(parts):
            dims.extend(names)
        return tuple(dims)

    def section(self, parts: Parts) -> tree.Section:
        kind, *remainder = parts
        name = next(iter(_only(tree.Name, remainder)), None)
        entries = tuple(part for part in remainder if isinstance(part, tree.Entry))
        return tree.Section(kind, name, entries, self._span(parts))

    def setting(self, parts: Parts) -> tree.Setting:
        return tree.Setting(parts[0], parts[2], self._span(parts), every=_is(parts[1], "EVERY"))

    cadence = setting

    def range(self, parts: Parts) -> tree.Range:
        return tree.Range(parts[0], parts[2], self._span(parts))

    def padded(self, parts: Parts) -> tree.Setting:
        key, _, value, _, pad = parts
        return tree.Setting(key, value, self._span(parts), pad)

    def rule(self, parts: Parts) -> tree.Rule:
        dims, _, axes, *how = parts
        name_by_word: dict[str, tree.Name] = {}
        for word, name in zip(how[::2], how[1::2], strict=True):
            name_by_word[str(word)] = name
        layout, strategy = name_by_word.get("as"), name_by_word.get("via")
        return tree.Rule(dims, axes, layout, strategy, self._span([*dims, *axes, *how]))

    def stage(self, parts: Parts) -> tree.Rule:
        """A stage of ZeRO (Rajbhandari et al. 2020) is short for the kinds of state that it
        shares out.
        """
        word, stage, _, axes = parts
        span = self._place(word).to(stage.span)
        if stage.unit or stage.value not in STAGES:
            help = "write `zero 1 over dp`, with a stage from 0 to 3"
            raise wrong("E0406", "this is not a stage of ZeRO", span, help=help)
        kinds = tuple(tree.Name(kind, span) for kind in STAGES[stage.value])
        return tree.Rule(kinds, axes, None, None, span.to(axes[-1].span))

    def binary(self, parts: Parts) -> tree.Binary:
        left, op, right = parts
        return tree.Binary(str(op), left, right, self._span(parts))

    def negative(self, parts: Parts) -> tree.Negative:
        return tree.Negative(parts[1], self._span(parts))

    def group(self, parts: Parts) -> tree.Expr:
        return evolve(parts[1], span=self._span(parts))

    def sequence(self, parts: Parts) -> tree.List:
        return tree.List(_nodes(parts), self._span(parts))

    def call(self, parts: Parts) -> tree.Call:
        name, *remainder = parts
        args = tuple(part for part in _nodes(remainder) if not isinstance(part, tree.Setting))
        return tree.Call(name, args, _only(tree.Setting, remainder), self._span(parts))

    def param(self, parts: Parts) -> tree.ParamUse:
        name, _, *dims, _ = parts
        *ins, outs = _nodes(dims)
        return tree.ParamUse(name, ins[0] if ins else (), outs, self._span(parts))

    def names(self, parts: Parts) -> tuple[tree.Name, ...]:
        return _only(tree.Name, parts)

    def name(self, parts: Parts) -> tree.Name:
        return tree.Name(str(parts[0]), self._span(parts))

    def number(self, parts: Parts) -> tree.Number:
        match = _NUMBER.fullmatch(parts[0])
        assert match, f"parser: a number that is none: {parts[0]}"
        whole, fraction, exponent, unit = (part.replace("_", "") for part in match.groups(""))
        span = self._span(parts)
        if max(map(len, (whole, fraction.lstrip("."), exponent.lstrip("eE+-")))) > MAX_DIGITS:
            raise wrong("E0106", f"a number of more than {MAX_DIGITS} digits", span)
        value = float(whole + fraction + exponent) if fraction or exponent else int(whole)
        if math.isinf(value):
            raise wrong("E0106", "this number is too large", span)
        if not value and re.search("[1-9]", whole + fraction):
            raise wrong("E0106", "this number is too small: it would become 0", span)
        return tree.Number(value, unit, span)

    def string(self, parts: Parts) -> tree.String:
        span = self._span(parts)

        def unescape(escape: re.Match[str]) -> str:
            if escape[1] not in _ESCAPES:
                message = f"`{escape[0]}` is not an escape"
                raise wrong("E0105", message, span, help='the escapes are `\\"` `\\\\` `\\n` `\\t`')
            return _ESCAPES[escape[1]]

        return tree.String(re.sub(r"\\(.)", unescape, parts[0][1:-1]), span)

    def _span(self, parts: Parts) -> Span:
        return self._place(parts[0]).to(self._place(parts[-1]))

    def _place(self, part: Any) -> Span:
        if not isinstance(part, Token):
            return part.span
        source = self._source
        line, column = part.line or 0, part.column or 0
        end_line, end_column = part.end_line or 0, part.end_column or 0
        return Span(source.path, line, column, end_line, end_column, source.text, source.shown)


@cache
def _builder() -> _Builder:
    return _Builder()


def _only(kind: type[T], parts: Parts) -> tuple[T, ...]:
    return tuple(part for part in parts if isinstance(part, kind))


def _is(part: Any, token: str) -> bool:
    return isinstance(part, Token) and part.type == token


def _nodes(parts: Parts) -> tuple[Any, ...]:
    return tuple(part for part in parts if not isinstance(part, Token))
