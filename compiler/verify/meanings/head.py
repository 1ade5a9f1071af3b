"""The last product and the cross entropy of its logits: what the product means, and the loss of that."""

from fractions import Fraction

from ...ir import Kind, Type, sharded
from ...ops.head import classes_of, tokens_of
from ..tensors import Dims, Tensor
from .call import Call, Meaning
from .loss import Labelled, number, whole, whole_dx


class _Head(Labelled):
    """The logits of a call whose operand, weight and labels stand from `at` on; capped, if the op says so."""

    def __init__(self, c: Call, at: int) -> None:
        self.operand, self.weight, self.labels = c.args[at : at + 3]
        tokens, classes = tokens_of(c.op, c.types[at]), classes_of(c.op, c.types[at + 1])
        dims, n = (*tokens, classes), c.numbers
        product = n.product(dims, self.operand, self.weight)
        self._slope: list[Tensor] = []
        if cap := c.number("cap"):
            self._slope = [n.function("softcap slope", product, constants=(cap,))]
            product = n.function("softcap", product, constants=(cap,))
        super().__init__(c, product, at + 1, at + 2)

    def back(self, d_logits: Tensor, of: Tensor, other: Tensor) -> Tensor:
        """The gradient of one factor of the product from that of the capped logits."""
        return self.n.product(of.dims, self.n.product(self.dims, d_logits, *self._slope), other)

    def to_operand(self, d_logits: Tensor) -> Tensor:
        return self.back(d_logits, self.operand, self.weight)

    def to_weight(self, d_logits: Tensor) -> Tensor:
        return self.back(d_logits, self.weight, self.operand)


# ---- whole


def _whole_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    head = _Head(c, 0)
    d_logits = whole_dx(c, grads[0], head, head.labels)
    return [head.to_operand(d_logits), head.to_weight(d_logits), None]


def _whole_back(c: Call) -> tuple[_Head, Tensor]:
    head = _Head(c, 1)
    return head, whole_dx(c, c.args[0], head, head.labels)


def _whole_dx(c: Call) -> list[Tensor]:
    head, d_logits = _whole_back(c)
    return [head.to_operand(d_logits)]


def _whole_dw(c: Call) -> list[Tensor]:
    head, d_logits = _whole_back(c)
    return [head.to_weight(d_logits)]


# ---- in parts


def _shared(x: Tensor, dims: Dims) -> Tensor:
    """What a rank has one of, with a dim of that size behind."""
    return Tensor(dims, x.array[..., None], x.degree)


def _parts(c: Call) -> list[Tensor]:
    """m, z relative to it in a dim of its own, and t, which is relative to nothing."""
    head = _Head(c, 0)
    m = head.peak()
    z = head.n.product(head.tokens, head.exponential(m))
    return [m, _shared(z, c.op.outputs[1].type.dims), head.n.product(head.tokens, head.target, head.x)]


def _logits_gradient(head: _Head, dz: Tensor, dt: Tensor, m: Tensor) -> Tensor:
    """`dz` has the dim of shares, of which each rank holds one."""
    n = head.n
    through = n.product(head.dims, n.product(head.tokens, dz), head.exponential(m))
    return n.total(head.dims, through, n.product(head.dims, dt, head.target))


def _part_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    head = _Head(c, 0)
    d_logits = _logits_gradient(head, grads[1], grads[2], head.peak())
    return [head.to_operand(d_logits), head.to_weight(d_logits), None]


def _part_back(c: Call) -> tuple[_Head, Tensor]:
    head, (dz, dt, *_, m) = _Head(c, 2), c.args
    return head, _logits_gradient(head, dz, dt, m)


def _part_dx(c: Call) -> list[Tensor]:
    head, d_logits = _part_back(c)
    return [head.to_operand(d_logits)]


def _part_dw(c: Call) -> list[Tensor]:
    head, d_logits = _part_back(c)
    return [head.to_weight(d_logits)]


# ---- together again


def _below(c: Call, m: Tensor, peak: Tensor) -> Tensor:
    return c.numbers.exponential(m, peak)


def _rejoined(c: Call) -> list[Tensor]:
    n, (m, z, t, peak, _) = c.numbers, c.args
    lost = n.negative(n.product(t.dims, _share_of_labels(c), peak))
    return [n.product(m.dims, z, _below(c, m, peak)), n.total(t.dims, t, lost)]


def _share_of_labels(c: Call) -> Tensor:
    """What of each label this rank's classes are."""
    n, labels, classes = c.numbers, c.args[4], str(c.op.get("classes"))
    m = c.types[0]
    type = Type(m.dtype, (classes,), tuple((axis, sharded(classes)) for axis in m.axes_in(Kind.MAXIMUM)))
    index, dims, share = c.world.indices(type, classes), (*labels.dims, classes), Fraction(c.number("smoothing"))
    is_label = (labels.onto(dims) == Tensor((classes,), index).onto(dims)).astype(int)
    real = n.constant((index < c.program.valid(classes)).astype(int), (classes,))
    hot = n.product(labels.dims, n.constant(is_label, dims), number(n, 1 - share))
    each = n.product((), real, number(n, share / c.program.valid(classes)))
    return n.total(labels.dims, hot, each)


def _rejoined_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    m, z, _, peak, _ = c.args
    dz = c.numbers.product(m.dims, grads[0], _below(c, m, peak))
    return [None, _shared(dz, z.dims), grads[1], None, None]


def _rejoined_dz(c: Call) -> list[Tensor]:
    dz, m, peak = c.args
    return [_shared(c.numbers.product(m.dims, dz, _below(c, m, peak)), c.dims)]


MEANINGS = {
    "linear_cross_entropy": Meaning(lambda c: [whole(c, _Head(c, 0), c.args[2])], _whole_gradients),
    "linear_cross_entropy_dx": Meaning(_whole_dx),
    "linear_cross_entropy_dw": Meaning(_whole_dw),
    "linear_parts": Meaning(_parts, _part_gradients),
    "linear_parts_dx": Meaning(_part_dx),
    "linear_parts_dw": Meaning(_part_dw),
    "rejoined": Meaning(_rejoined, _rejoined_gradients),
    "rejoined_dz": Meaning(_rejoined_dz),
}
