"""What a step does around forward and backward."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import numpy as np

from ...ir import Bucket, Program
from ...settings import Optimizer
from ..flat import own, packed, padded, parts
from ..numbers import Numbers
from ..tensors import Tensor
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


def _bucket(c: Call, found: Callable[[Bucket], bool]) -> Bucket:
    return next(bucket for bucket in c.program.buckets if found(bucket))


def _pack(c: Call) -> list[Tensor]:
    return [packed(c.program, _bucket(c, lambda bucket: bucket.dim == c.get("dim")), c.args)]


def _unpack(c: Call) -> list[Tensor]:
    return parts(c.program, c.world, _bucket(c, lambda bucket: bucket.name == c.get("bucket")), c.args[0])


def unpacked(c: Call) -> list[Tensor]:
    """The gradients of an update, one for each of its parameters; zero for what the rank does not update."""
    grad, name = c.args[0], dict(c.op.attrs).get("bucket")
    if name is None:
        return [grad]
    bucket = _bucket(c, lambda bucket: bucket.name == name)
    return parts(c.program, c.world, bucket, padded(c.program, c.world, bucket, grad, c.numbers))


def _update(c: Call) -> list[Tensor]:
    scale, count = c.args[1:3]
    each = zip(c.op.inputs[3:], c.args[3:], unpacked(c), strict=True)
    moved = [updated(c.program, c.numbers, name, param, grad, scale, count) for name, param, grad in each]
    name = dict(c.op.attrs).get("bucket")
    return own(c.program, c.world, _bucket(c, lambda b: b.name == name), moved, c.numbers) if name else moved


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
    "unpack": Meaning(_unpack),
    "update": Meaning(_update),
    "zeros": Meaning(lambda c: [c.numbers.product(c.args[0].dims, c.args[0], c.numbers.ratio(0, 1))]),
}
