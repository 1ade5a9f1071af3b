"""What a step does around forward and backward."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import prod

import numpy as np

from ...ir import Program
from ...settings import Optimizer
from ..numbers import Numbers
from ..tensors import Tensor, degree_of
from .call import Call, Meaning


def count_valid(labels: Tensor) -> Tensor:
    """The number of labels that are not negative, an integer."""
    return Tensor((), (labels.array >= 0).sum(axis=tuple(range(labels.lead, labels.array.ndim))))


def reciprocal(n: Numbers, count: Tensor) -> Tensor:
    """1 / max(count, 1)."""
    return n.inverse(n.constant(np.maximum(count.array, 1)))


def squares(n: Numbers, values: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements."""
    return n.total((), *(n.product((), x, x) for x in values))


def norm(n: Numbers, parts: Sequence[Tensor]) -> Tensor:
    """The root of a sum."""
    return n.function("root", n.total((), *parts))


def clipping(n: Numbers, norm: Tensor, most: object) -> Tensor:
    """min(1, most / norm); 1 where most is 0."""
    return n.function("clip", norm, constants=(most,)) if most else n.ratio(1, 1)


def updated(
    program: Program, n: Numbers, name: str, param: Tensor, grad: Tensor, scale: Tensor, count: Tensor
) -> Tensor:
    """The optimizer's step on one parameter: a function of each element alone; nothing where no label counted."""
    scaled = n.product(param.dims, grad, scale)
    moved = n.function("update", param, scaled, constants=(name, *_settings(program.train.optimizer, name)))
    there = count.onto(param.dims) > 0
    return Tensor(param.dims, np.where(there, moved.array, param.array), moved.degree | param.degree)


def _settings(optimizer: Optimizer, name: str) -> tuple[object, ...]:
    """What the optimizer does to the parameter `name`; its averages are functions of the same element's gradients."""
    own = next((g for g in optimizer.groups if any(fnmatchcase(name, p) for p in g.params)), None)
    decay, scale = (own.weight_decay, own.lr_scale) if own else (optimizer.weight_decay, 1.0)
    o, s = optimizer, optimizer.schedule
    return (o.kind, o.lr, o.betas, o.eps, o.momentum, s.kind, s.warmup, s.floor, decay, scale)


def _same(c: Call) -> list[Tensor]:
    return [c.args[0]]


def _pack(c: Call) -> list[Tensor]:
    lead = np.broadcast_shapes(*(x.array.shape[: x.lead] for x in c.args))
    parts = [np.broadcast_to(x.array, (*lead, *x.array.shape[x.lead :])).reshape(*lead, -1) for x in c.args]
    return [Tensor(c.dims, np.concatenate(parts, axis=-1), degree_of(c.args))]


def unpacked(c: Call) -> list[Tensor]:
    """The gradients of an update, one for each of its parameters: the operand is one's own, or the flat one of all."""
    grad, params = c.args[0], c.args[3:]
    sizes = [prod(c.world.shape(type)) for type in c.types[3:]]
    flat = grad.array.reshape(*grad.array.shape[: grad.lead], -1)
    if flat.shape[-1] != sum(sizes):
        raise ValueError("the gradient has not the size of its parameters")
    parts = np.split(flat, np.cumsum(sizes)[:-1], axis=-1)
    shapes = [c.world.shape(type) for type in c.types[3:]]
    return [
        Tensor(p.dims, part.reshape(*part.shape[:-1], *shape), grad.degree)
        for p, part, shape in zip(params, parts, shapes, strict=True)
    ]


def _update(c: Call) -> list[Tensor]:
    scale, count = c.args[1:3]
    each = zip(c.op.inputs[3:], c.args[3:], unpacked(c), strict=True)
    return [updated(c.program, c.numbers, name, param, grad, scale, count) for name, param, grad in each]


MEANINGS = {
    "cast": Meaning(_same, lambda c, grads: [grads[0]]),
    "clip_scale": Meaning(lambda c: [clipping(c.numbers, c.args[0], c.get("max"))]),
    "count_valid": Meaning(lambda c: [count_valid(c.args[0])]),
    "grad_norm": Meaning(lambda c: [norm(c.numbers, c.args)]),
    "leaf": Meaning(_same, lambda c, grads: [grads[0]]),
    "leaf_grad": Meaning(_same),
    "pack": Meaning(_pack),
    "reciprocal": Meaning(lambda c: [reciprocal(c.numbers, c.args[0])]),
    "sum_squares": Meaning(lambda c: [squares(c.numbers, c.args)]),
    "update": Meaning(_update),
    "zeros": Meaning(lambda c: [c.numbers.product(c.args[0].dims, c.args[0], c.numbers.ratio(0, 1))]),
}
