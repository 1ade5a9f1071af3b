"""Nonlinear functions of one operand, elementwise: a row has all that the compiler and its proof
know of one.

Non-goals: the functions that programs call (torch's, or `runtime/ops/functional.py`).
"""

import cmath
import math
from collections.abc import Callable, Sequence
from math import erf, inf, pi, sqrt
from typing import Any

from attrs import Factory, field, frozen

from ..ir import Op, Type
from .protocol import FUNCTIONAL, Attribute, OpDef, Operand, Shape, Shapes, Vjp, takes
from .saved_tensors import Saved, result

Formula = Callable[[Any], Any] | Callable[[Any, Any], Any]
"""A function of one number and the op's attribute, if it has one.

Numbers are floats, or complex: tests take derivatives by complex steps.  `erf` alone takes floats
only.
"""


def same(types: Sequence[Type], op: Op) -> list[Shape]:
    """The first operand's element type and dims."""
    return [(types[0].dtype, types[0].dims)]


@frozen
class Pointwise(OpDef):
    """An elementwise function of one operand; `value` and `slope` are what the proof computes
    in float64.
    """

    value: Formula = field(kw_only=True)
    slope: Formula = field(kw_only=True)
    shapes: Shapes | None = same
    operands: tuple[Operand, ...] = takes("x")
    vjp: Vjp | None = Vjp()
    function: str = Factory(lambda self: self.name, takes_self=True)
    user_visible: bool = True


def _exp(x: Any) -> Any:
    if isinstance(x, complex):
        return cmath.exp(x)
    return inf if x > 709 else math.exp(x)


def _tanh(x: Any) -> Any:
    return cmath.tanh(x) if isinstance(x, complex) else math.tanh(x)


def _sigmoid(x: Any) -> Any:
    return 0.5 + 0.5 * _tanh(0.5 * x)  # does not overflow


def _sigmoid_slope(x: Any) -> Any:
    return _sigmoid(x) * _sigmoid(-x)


def _tanh_slope(x: Any) -> Any:
    return 1 - _tanh(x) ** 2


def _bent(x: Any) -> Any:
    """The argument of tanh in gelu's approximation."""
    return sqrt(2 / pi) * (x + 0.044715 * x * x * x)


def _normal(x: Any, approximate: str) -> Any:
    """The normal distribution function, or tanh in its place."""
    if approximate == "tanh":
        return 0.5 + 0.5 * _tanh(_bent(x))
    return 0.5 + 0.5 * erf(x / sqrt(2))


def _normal_slope(x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        return 0.5 * _tanh_slope(_bent(x)) * sqrt(2 / pi) * (1 + 3 * 0.044715 * x * x)
    return _exp(-x * x / 2) / sqrt(2 * pi)


FUNCTIONS = (
    Pointwise("exp", "e^x.", value=_exp, slope=_exp, saves=result, torch="torch.exp"),
    Pointwise(
        "gelu",
        "x · Φ(x), Φ the normal distribution's, or its approximation by tanh (Hendrycks and"
        " Gimpel 2016).",
        attributes=(Attribute("approximate", choices=("none", "tanh"), default="none"),),
        value=lambda x, how: x * _normal(x, how),
        slope=lambda x, how: _normal(x, how) + x * _normal_slope(x, how),
        module=FUNCTIONAL,
        stem="g",
    ),
    Pointwise(
        "leaky_relu",
        "x where it is positive, else x · slope (Maas et al. 2013).",
        attributes=(Attribute("negative_slope"),),
        value=lambda x, slope: x if x.real > 0 else slope * x,
        slope=lambda x, slope: 1.0 if x.real > 0 else slope,
        module=FUNCTIONAL,
        stem="g",
    ),
    Pointwise(
        "relu",
        "max(x, 0) (Nair and Hinton 2010).",
        value=lambda x: x if x.real > 0 else 0.0,
        slope=lambda x: float(x.real > 0),
        saves=result,
        module=FUNCTIONAL,
        stem="g",
    ),
    Pointwise(
        "sigmoid",
        "1 / (1 + e^-x).",
        value=_sigmoid,
        slope=_sigmoid_slope,
        saves=result,
        torch="torch.sigmoid",
    ),
    Pointwise(
        "silu",
        "x · sigmoid(x) (Hendrycks and Gimpel 2016).",
        value=lambda x: x * _sigmoid(x),
        slope=lambda x: _sigmoid(x) + x * _sigmoid_slope(x),
        module=FUNCTIONAL,
        stem="g",
    ),
    Pointwise(
        "softcap",
        "cap · tanh(x / cap) (Gemma Team 2024).",
        attributes=(
            Attribute("cap", range=(lambda value: value > 0, "a number above 0, for instance 30")),
        ),
        value=lambda x, cap: cap * _tanh(x / cap),
        slope=lambda x, cap: _tanh_slope(x / cap),
        saves=lambda local: Saved(others=(("tanh", local.bytes()),)),
        torch="softcap",
    ),
    Pointwise(
        "tanh",
        "The hyperbolic tangent.",
        value=_tanh,
        slope=_tanh_slope,
        saves=result,
        torch="torch.tanh",
    ),
)
