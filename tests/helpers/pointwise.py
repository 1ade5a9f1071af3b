"""Every elementwise function of one operand, by its definition in plain torch: the one row that a test needs of each.

Non-goals: torch's own functions, which emitted programs call and are held against these.
"""

from collections.abc import Callable
from math import pi, sqrt

import torch
from attrs import frozen
from torch import Tensor

from scalec.compiler.ir import Attr


@frozen
class Pointwise:
    """A definition, and the attributes that tests give it, once or several times."""

    formula: Callable[..., Tensor]
    attrs: tuple[dict[str, Attr], ...] = ({},)

    def of(self, name: str, x: str) -> str:
        """The call of `x` as a plan writes it."""
        return f"{name}({', '.join([x, *(f'{key}={value}' for key, value in self.attrs[0].items())])})"


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Hendrycks and Gimpel 2016."""
    inner = (sqrt(2 / pi) * (x + 0.044715 * x**3)).tanh() if approximate == "tanh" else (x / sqrt(2)).erf()
    return 0.5 * x * (1 + inner)


POINTWISE = {
    "exp": Pointwise(torch.exp),
    "gelu": Pointwise(gelu, ({"approximate": "none"}, {"approximate": "tanh"})),
    "leaky_relu": Pointwise(
        lambda x, negative_slope: torch.where(x > 0, x, negative_slope * x), ({"negative_slope": 0.25},)
    ),
    "relu": Pointwise(lambda x: x * (x > 0)),
    "sigmoid": Pointwise(lambda x: 1 / (1 + (-x).exp())),
    "silu": Pointwise(lambda x: x / (1 + (-x).exp())),
    "softcap": Pointwise(lambda x, cap: cap * (x / cap).tanh(), ({"cap": 2.0},)),
    "tanh": Pointwise(torch.tanh),
}
"""By the op's name."""
