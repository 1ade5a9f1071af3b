"""`vjp`: the gradients that the op states which it is of, of what it is given of operands and results."""

from collections.abc import Mapping

import numpy as np

from ...ir import Type
from ...ops import VJPS
from ..tensors import Tensor
from .call import Call, Semantics


def vjp(c: Call, known: Mapping[str, Semantics]) -> list[Tensor]:
    """By the semantics `known` of ops; gradients that are not given count zero."""
    it = VJPS.pulled(c.op, c.types)
    given = dict(zip(it.read, c.args[it.grads :], strict=False))
    args = [given[i] if i in given else zero(c, type) for i, type in enumerate(it.types)]
    results = c.args[it.grads + len(it.read) :]
    gradients = known[it.op.kind].gradients
    assert gradients, f"verify: {it.op.kind} has no gradients"
    call = Call(c.program, c.world, c.numbers, it.op, args, it.types, results, it.wrt)
    found = gradients(call, [*c.args[: it.grads]])
    wanted = [found[i] for i in it.wrt]
    return [grad for grad in wanted if grad]


def zero(c: Call, type: Type) -> Tensor:
    """Zeros, alike on all ranks."""
    shape = (1, *(1 for _ in c.world.axes), *c.world.shape(type))
    return c.numbers.constant(np.zeros(shape, int), type.dims)
