"""The last product and the cross entropy of its logits: what the product means, and the loss of that."""

from ...ops.chunked_logits import classes_of, tokens_of
from ..tensors import Tensor
from .call import Call, Semantics
from .loss import Capped, whole, whole_dx
from .parts import parts, shared_gradient


class _Head(Capped):
    """The logits of a call."""

    def __init__(self, c: Call) -> None:
        self.operand, self.weight, self.labels, *self.bias = c.args
        dims, n = (*tokens_of(c.op, c.types[0]), classes_of(c.op, c.types[1])), c.numbers
        product = n.product(dims, self.operand, self.weight)
        super().__init__(c, n.total(dims, product, *self.bias) if self.bias else product, 1, 2)

    def gradients(self, d_logits: Tensor) -> list[Tensor | None]:
        """Those of all operands."""
        n, x, weight = self.n, self.operand, self.weight
        biases = [n.product(it.dims, d_logits) for it in self.bias]
        return [n.product(x.dims, d_logits, weight), n.product(weight.dims, d_logits, x), None, *biases]


# ---- whole


def _whole_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    head = _Head(c)
    return head.gradients(whole_dx(c, grads[0], head, head.labels))


# ---- in parts


def _part_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    head, (dz, dt) = _Head(c), grads[-2:]
    return head.gradients(shared_gradient(head, dz, dt, c.results[0]))


MEANINGS = {
    "linear_cross_entropy": Semantics(lambda c: [whole(c, _Head(c), c.args[2])], _whole_gradients),
    "linear_softmax_stats": Semantics(lambda c: parts(c, _Head(c)), _part_gradients),
}
