"""Fields that are numbers: counts, reals within a range, parts of a whole, sizes in bytes."""

from collections.abc import Callable

from attrs import frozen

from ...syntax import tree
from ...syntax.diagnostics import listing
from .errors import spelled, unfit, wrong
from .field import WHAT, Metadata, Value


@frozen
class Bound:
    """A range of numbers and its name."""

    text: str
    holds: Callable[[float], bool]


SOMETHING = Bound("at least 1", lambda number: number >= 1)
POSITIVE = Bound("above 0", lambda number: number > 0)
NOT_NEGATIVE = Bound("at least 0", lambda number: number >= 0)
INT64 = Bound("below 2^63", lambda number: number < 2**63)
FRACTION = Bound("at least 0 and below 1", lambda number: 0 <= number < 1)
TOKEN = Bound("an id from 0 to 2^32 - 1", lambda number: 0 <= number < 2**32 and number % 1 == 0)
SOME = Bound("above 0 and below 1", lambda number: 0 < number < 1)


def count(doc: str, at_least: int = 0) -> Metadata:
    """An integer."""
    bound = Bound(f"at least {at_least}", lambda number: number >= at_least)

    def read(setting: tree.Setting) -> int:
        return int(within(bound, _whole(setting, setting.value, "an integer"), setting, setting.value))

    return {WHAT: Value(doc, read, str)}


def counts(doc: str) -> Metadata:
    """A list of integers: `[9, 10, 10, 9]`."""

    def item(setting: tree.Setting, expr: tree.Expr) -> int:
        return int(within(NOT_NEGATIVE, _whole(setting, expr, "integers"), setting, expr))

    def read(setting: tree.Setting) -> tuple[int, ...]:
        match setting.value:
            case tree.List(items=(_, *_) as items):
                return tuple(item(setting, expr) for expr in items)
            case other:
                raise unfit(setting, other, "a list of integers, as in `[9, 10, 10, 9]`")

    return {WHAT: Value(doc, read, lambda numbers: f"[{', '.join(map(str, numbers))}]")}


def real(doc: str, bound: Bound) -> Metadata:
    """A number."""
    return {WHAT: Value(doc, lambda setting: _real(setting, setting.value, bound), repr)}


def pair(doc: str, bound: Bound) -> Metadata:
    """Two numbers: `[0.9, 0.95]`."""

    def read(setting: tree.Setting) -> tuple[float, float]:
        match setting.value:
            case tree.List(items=(first, second)):
                return _real(setting, first, bound), _real(setting, second, bound)
            case other:
                raise unfit(setting, other, "two numbers, as in `[0.9, 0.95]`")

    return {WHAT: Value(doc, read, lambda numbers: f"[{numbers[0]!r}, {numbers[1]!r}]")}


def share(doc: str, bound: Bound = FRACTION) -> Metadata:
    """A part of the whole: `5%` or `0.05`."""

    def read(setting: tree.Setting) -> float:
        match setting.value:
            case tree.Number(value=value, unit="%"):
                return within(bound, value / 100, setting, setting.value)
            case other:
                return _real(setting, other, bound)

    return {WHAT: Value(doc, read, repr)}


UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def size(doc: str) -> Metadata:
    """A number of bytes: `25MiB`."""

    def read(setting: tree.Setting) -> int:
        match setting.value:
            case tree.Number(value=int(), unit=unit) as number if number.value > 0 and unit in UNITS:
                return _bytes(setting, number)
            case other:
                help = f"a size is a whole number above 0 and one of {listing(UNITS)}"
                raise unfit(setting, other, "a size, as in `25MiB`", help)

    return {WHAT: Value(doc, read, _sized)}


@frozen
class Size:
    """A number of bytes where a number without unit counts something else."""

    bytes: int


def count_or_size(doc: str) -> Metadata:
    """An integer, at least 1, or a number of bytes."""

    def read(setting: tree.Setting) -> int | Size:
        match setting.value:
            case tree.Number(value=int(), unit=unit) as number if number.value > 0 and unit in UNITS:
                return Size(_bytes(setting, number))
            case other:
                what = "an integer or a size, as in `40GiB`"
                return int(within(SOMETHING, _whole(setting, other, what), setting, other))

    return {WHAT: Value(doc, read, lambda it: _sized(it.bytes) if isinstance(it, Size) else str(it))}


def _bytes(setting: tree.Setting, number: tree.Number) -> int:
    return int(within(INT64, number.value * UNITS[number.unit], setting, number))


def _sized(bytes: int) -> str:
    unit = next(unit for unit, size in UNITS.items() if bytes % size == 0)
    return f"{bytes // UNITS[unit]}{unit}"


def _whole(setting: tree.Setting, expr: tree.Expr, what: str) -> int:
    number = number_of(setting, expr, what, spelled(expr))
    if isinstance(number, float):
        raise unfit(setting, expr, what, spelled(expr))
    return int(within(INT64, number, setting, expr))


def _real(setting: tree.Setting, expr: tree.Expr, bound: Bound) -> float:
    return float(within(bound, number_of(setting, expr, "a number"), setting, expr))


def number_of(setting: tree.Setting, expr: tree.Expr, what: str, help: str = "") -> int | float:
    """The number that an expression is, or an error that `what` was wanted."""
    match expr:
        case tree.Number(value=value, unit=""):
            return value
        case tree.Negative(value=tree.Number(value=value, unit="")):
            return -value
        case other:
            raise unfit(setting, other, what, help)


def within(bound: Bound, number: float, setting: tree.Setting, expr: tree.Expr) -> float:
    """The number, if it is in the range."""
    if not bound.holds(number):
        raise wrong("E0405", f"`{setting.key}` must be {bound.text}", expr.span)
    return number
