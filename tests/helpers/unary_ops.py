"""Every op of one operand that gives a tensor of the same dims, by its definition in plain torch:
the row for tests.

From it come the op's cases of the typing rule, the proof's semantics, random models, the memory
account and training.  Non-goals: torch's own functions, which emitted programs call and are held
against these.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from attrs import frozen
from torch import Tensor

from helpers.reference_ops import gelu, silu, soft_cap, softmax
from scalec.compiler.ir import Attr
from scalec.compiler.ops import OPS

Formula = Callable[..., Tensor]


@frozen
class Unary:
    """A definition, and the attributes that tests give it, once or several times.

    The definition takes `dim` where the op goes over one dim, which is no attribute here.
    """

    formula: Formula
    attrs: tuple[dict[str, Attr], ...] = ({},)


def goes_over_one(name: str) -> bool:
    """Whether an op has an attribute `over`: one dim, the last where a plan names none."""
    return any(attribute.dims == "last" for attribute in OPS[name].attributes)


def make_call(name: str, x: str, over: str = "") -> str:
    """The call of `x` as a plan writes it, over a dim if the op goes over one."""
    given = {**UNARY[name].attrs[0], **({"over": over} if over and goes_over_one(name) else {})}
    return f"{name}({', '.join([x, *(f'{key}={value}' for key, value in given.items())])})"


def cases(name: str, dims: Sequence[str]) -> Iterator[tuple[Formula, dict[str, Attr]]]:
    """The definition for tensors of these dims, the first of which counts samples, with each of
    the op's attributes.
    """
    for attrs in UNARY[name].attrs:
        if goes_over_one(name):
            for dim in dims[1:]:
                yield (
                    partial(UNARY[name].formula, dim=dims.index(dim), **attrs),
                    {**attrs, "over": (dim,)},
                )
        else:
            yield partial(UNARY[name].formula, **attrs), attrs


UNARY = {
    "exp": Unary(torch.exp),
    "gelu": Unary(gelu, ({"approximate": "none"}, {"approximate": "tanh"})),
    "leaky_relu": Unary(
        lambda x, negative_slope: torch.where(x > 0, x, negative_slope * x),
        ({"negative_slope": 0.25},),
    ),
    "relu": Unary(lambda x: x * (x > 0)),
    "roll": Unary(
        lambda x, by, dim: x.index_select(
            dim, (torch.arange(x.shape[dim]) - int(by)) % x.shape[dim]
        ),
        ({"by": 2}, {"by": -1}),
    ),
    "sigmoid": Unary(lambda x: 1 / (1 + (-x).exp())),
    "silu": Unary(silu),
    "softcap": Unary(soft_cap, ({"cap": 2.0},)),
    "softmax": Unary(softmax),
    "tanh": Unary(torch.tanh),
}
"""By the op's name."""
