"""The semantics of a step's ops around forward and backward."""

from collections.abc import Sequence

import numpy as np

from ...config.settings import Optimizer
from ...ir import Bucket, Program
from ..sharded_state import count_mask, pack_bucket, parts, to_shards
from ..tensors import RANDOM, Dims, Numbers, Tensor
from .call import Call, Semantics


def count_valid(labels: Tensor) -> Tensor:
    """The number of labels that are not negative, an integer."""
    return Tensor((), (labels.array >= 0).sum(axis=tuple(range(labels.lead, labels.array.ndim))))


def reciprocal(n: Numbers, count: Tensor) -> Tensor:
    """1 / max(count, 1)."""
    return n.inverse(n.constant(np.maximum(count.array, 1)))


def squares(n: Numbers, values: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements."""
    return n.total((), *(n.product((), x, x) for x in values))


def _squares(c: Call) -> list[Tensor]:
    """The sum of squares on a rank; values that several ranks of a pipeline share count on the
    first of them alone.
    """
    if "stages" not in dict(c.op.attrs):
        return [squares(c.numbers, c.args)]
    once = [int(rank) for rank in c.op.names("once")[:1]]
    values = list[Tensor]()
    for x in c.args:
        bucket = next(bucket for bucket in c.program.buckets if bucket.dim in x.dims)
        mask = count_mask(c.program, c.world, bucket, once, c.numbers)
        values.append(c.numbers.product(x.dims, x, mask))
    return [squares(c.numbers, values)]


def norm(n: Numbers, parts: Sequence[Tensor]) -> Tensor:
    """The root of a sum."""
    return n.function("root", n.total((), *parts))


def loss_scale(n: Numbers, axes: int) -> Tensor:
    """Any number; that it is 0 is as probable as any other."""
    return Tensor((), n.random((1,) * axes, "loss scale"), RANDOM)


def unscale(n: Numbers, x: Tensor, scale: Tensor, times: int = 1) -> Tensor:
    """x / scale, `times` times."""
    return n.product(x.dims, x, *[n.inverse(scale)] * times)


def norm_without_scale(n: Numbers, scale: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The root of a sum, divided by a scale: the root of what the sum is without its square."""
    return n.function("root", unscale(n, n.total((), *parts), scale, times=2))


def clipping(n: Numbers, norm: Tensor, most: object) -> Tensor:
    """min(1, most / norm); 1 where most is 0."""
    if not most:
        return n.ratio(1, 1)
    return n.function("clip", norm, constants=(most,))


def update_param(
    program: Program,
    n: Numbers,
    name: str,
    param: Tensor,
    grad: Tensor,
    scale: Tensor,
    count: Tensor,
) -> Tensor:
    """The optimizer's step on one parameter: a function of each element, and of the changes to the
    count.

    Nothing where no label counted.
    """
    scaled, due = n.product(param.dims, grad, scale), _onto(n, count, param.dims)
    constants = (name, *_settings(program.train.optimizer, name))
    moved = n.function("update", param, scaled, due, constants=constants)
    array = np.where(due.array > 0, moved.array, param.array)
    return Tensor(param.dims, array, moved.degree | param.degree)


def _onto(n: Numbers, count: Tensor, dims: Dims) -> Tensor:
    """A count as a number beside values of these dims."""
    return n.constant(count.onto(dims), dims)


def if_finite(n: Numbers, count: Tensor) -> Tensor:
    """A count that is 0 where it was; it also shows that it has been asked whether values are
    finite.

    All numbers of a field are; that ranks ask the same norm and loss is known by types, and these
    are results.
    """
    return _gate(n, "finite", count)


def if_below(n: Numbers, count: Tensor, loss: Tensor, limit: Tensor) -> Tensor:
    """A count that is 0 where it was; who reads it depends on loss and limit."""
    return _gate(n, "below", count, loss, limit)


def _gate(n: Numbers, name: str, count: Tensor, *values: Tensor) -> Tensor:
    value = n.function(name, n.constant(count.array), *values)
    array = np.where(count.array > 0, value.array, np.zeros_like(value.array))
    return Tensor((), array, value.degree)


def loss_limit(n: Numbers, axes: int, deviations: object) -> Tensor:
    """Any number, which all ranks hold."""
    limit = Tensor((), n.random((1,) * axes, "loss limit"), RANDOM)
    return n.function("limit", limit, constants=(deviations,))


def update_bias(n: Numbers, bias: Tensor, load: Tensor, count: Tensor, rate: float) -> Tensor:
    """A function of each bias, its load, the mean of its row's and the count; nothing where no
    label counted.
    """
    loads = Tensor(bias.dims, load.array)
    mean = n.product(bias.dims[:-1], loads, n.ratio(1, load.array.shape[-1]))
    spread = Tensor(bias.dims, np.broadcast_to(mean.onto(bias.dims), loads.array.shape))
    due = _onto(n, count, bias.dims)
    moved = n.function("balance", bias, loads, spread, due, constants=(rate,))
    array = np.where(due.array > 0, moved.array, bias.array)
    return Tensor(bias.dims, array, moved.degree | bias.degree)


def _settings(optimizer: Optimizer, name: str) -> tuple[object, ...]:
    """Settings of the optimizer for `name`; its averages are functions of the same element's
    gradients.
    """
    group, o, s = optimizer.group_of(name), optimizer, optimizer.schedule
    return (
        o.kind,
        o.lr,
        o.betas,
        o.eps,
        o.momentum,
        s.kind,
        s.warmup,
        s.floor,
        group.weight_decay,
        group.lr_scale,
    )


def _same(c: Call) -> list[Tensor]:
    return [c.args[0]]


def _bucket_of(c: Call) -> Bucket:
    return c.program.bucket(str(c.get("bucket")))


def _update(c: Call) -> list[Tensor]:
    (scale, count), bucket = c.args[1:3], c.bucket
    moved = list[Tensor]()
    for name, param, grad in zip(c.op.inputs[3:], c.args[3:], c.update_gradients, strict=True):
        moved.append(update_param(c.program, c.numbers, name, param, grad, scale, count))
    if not bucket:
        return moved
    return to_shards(c.program, c.world, bucket, moved, c.numbers)


MEANINGS = {
    "balanced": Semantics(lambda c: [update_bias(c.numbers, *c.args, rate=c.number("rate"))]),
    "begin": Semantics(lambda c: []),
    "cast": Semantics(_same),
    "clip_scale": Semantics(lambda c: [clipping(c.numbers, c.args[0], c.get("max"))]),
    "count_valid": Semantics(lambda c: [count_valid(c.args[0])]),
    "grad_norm": Semantics(lambda c: [norm(c.numbers, c.args)]),
    "if_below": Semantics(lambda c: [if_below(c.numbers, *c.args)]),
    "if_finite": Semantics(lambda c: [if_finite(c.numbers, c.args[0])]),
    "leaf": Semantics(_same),
    "leaf_grad": Semantics(_same),
    "loss_limit": Semantics(
        lambda c: [loss_limit(c.numbers, len(c.world.axes), c.get("deviations"))]
    ),
    "loss_scale": Semantics(lambda c: [loss_scale(c.numbers, len(c.world.axes))]),
    "pack": Semantics(lambda c: [pack_bucket(c.program, _bucket_of(c), c.args)]),
    "reciprocal": Semantics(lambda c: [reciprocal(c.numbers, c.args[0])]),
    "sum_squares": Semantics(_squares),
    "unpack": Semantics(lambda c: parts(c.program, c.world, _bucket_of(c), c.args[0])),
    "unscaled": Semantics(lambda c: [unscale(c.numbers, c.args[0], c.args[1])]),
    "unscaled_norm": Semantics(lambda c: [norm_without_scale(c.numbers, c.args[0], c.args[1:])]),
    "update": Semantics(_update),
    "one": Semantics(lambda c: [c.numbers.ratio(1, 1)]),
    "zeros": Semantics(lambda c: [c.zero(c.op.outputs[0].type)]),
}
