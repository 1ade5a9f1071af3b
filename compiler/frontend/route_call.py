"""Routes as a plan writes them: where they are, and the call `top(logits, k, …)` of each."""

from collections.abc import Iterator, Sequence

from attrs import evolve

from ..ops.protocol import Attribute, OpDef
from ..ops.routers import TOP
from ..syntax import tree
from ..syntax.diagnostics import wrong

CHOICES = Attribute("k", kinds=(int,))
FACTORS = tuple(
    Attribute(name, default=0.0, range=(lambda value: value >= 0, "0 or above"))
    for name in ("capacity", "balance", "z")
)
AUX_LOSS_FACTOR = Attribute("aux_loss", default=0.0, range=(lambda value: value >= 0, "0 or above"))
AUX_BATCH = Attribute(
    "aux_batch", default=1, kinds=(int,), range=(lambda value: value >= 1, "1 or above")
)
RATE = Attribute("rate", default=0.0, range=(lambda value: value > 0, "above 0"))
CALL = evolve(
    TOP,
    operands=TOP.operands[:1],
    attributes=(CHOICES, *TOP.attributes, *FACTORS, RATE, AUX_LOSS_FACTOR, AUX_BATCH),
)
"""`top` as plans write it: in the IR the number of choices is the size of a dim, and losses and
capacity are ops.
"""


def _argument_names(entry: OpDef) -> list[str]:
    """The arguments of an op that a plan writes, in their order."""
    operands = [operand.name for operand in entry.operands if not operand.implied]
    return operands + [attribute.name for attribute in entry.attributes if not attribute.implied]


PLACES = _argument_names(CALL)
"""The arguments of `top`, in the order that a plan has to write them in without their names."""


def get_argument(route: tree.Route, name: str) -> tree.Expr | None:
    """The argument of a route's `top`, by its name or else by its place."""
    for setting in route.by.kwargs:
        if setting.key.name == name:
            return setting.value
    return dict(zip(PLACES, route.by.args, strict=False)).get(name)


def check_range(route: tree.Route, attribute: Attribute, value: float) -> float:
    """The value of an argument of `top`.  Raises PlanError where it is out of its range."""
    if attribute.range and not attribute.range[0](value):
        message = f"`{TOP.name}`'s {attribute.name} is {value:g}"
        raise wrong("E0313", message, route.by.span, help=attribute.range[1])
    return value


def adds_to_loss(item: tree.Statement) -> bool:
    """Whether a statement has a route that adds to the loss."""
    for route, _ in find_routes((item,)):
        if any(get_argument(route, name) is not None for name in ("balance", "z")):
            return True
    return False


def find_routes(
    body: Sequence[object], repeats: tuple[str, ...] = ()
) -> Iterator[tuple[tree.Route, tuple[str, ...]]]:
    """The routes of a body, at any depth, each with the dims of the repeats around it."""
    for item in body:
        match item:
            case tree.Route():
                yield item, repeats
            case tree.Repeat():
                yield from find_routes(item.body, (*repeats, item.dim.name))
            case tree.If():
                yield from find_routes((*item.body, *item.others), repeats)
            case _:
                pass
