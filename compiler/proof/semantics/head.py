"""The last product and the cross entropy of its logits: what the product means, and the loss of that."""

from ...ops.chunked_logits import classes_of, tokens_of
from ..tensors import Tensor
from .call import Call, Semantics
from .loss import Capped, whole, whole_dx
from .parts import parts, shared_gradient


class _Head(Capped):
    """The logits of a call whose operand, weight and labels, and perhaps a bias, stand from `at` on."""

    def __init__(self, c: Call, at: int) -> None:
        self.operand, self.weight, self.labels, *self.bias = c.args[at:]
        dims, n = (*tokens_of(c.op, c.types[at]), classes_of(c.op, c.types[at + 1])), c.numbers
        product = n.product(dims, self.operand, self.weight)
        super().__init__(c, n.total(dims, product, *self.bias) if self.bias else product, at + 1, at + 2)

    def to_operand(self, d_logits: Tensor) -> Tensor:
        return self.n.product(self.operand.dims, d_logits, self.weight)

    def to_weight(self, d_logits: Tensor) -> Tensor:
        return self.n.product(self.weight.dims, d_logits, self.operand)

    def to_bias(self, d_logits: Tensor) -> Tensor:
        return self.n.product(self.dims[-1:], d_logits)

    def gradients(self, d_logits: Tensor) -> list[Tensor | None]:
        """Those of all operands."""
        biases = [self.to_bias(d_logits) for _ in self.bias]
        return [self.to_operand(d_logits), self.to_weight(d_logits), None, *biases]


# ---- whole


def _whole_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    head = _Head(c, 0)
    return head.gradients(whole_dx(c, grads[0], head, head.labels))


def _whole_back(c: Call) -> tuple[_Head, Tensor]:
    head = _Head(c, 1)
    return head, whole_dx(c, c.args[0], head, head.labels)


def _whole_dx(c: Call) -> list[Tensor]:
    head, d_logits = _whole_back(c)
    return [head.to_operand(d_logits)]


def _whole_dw(c: Call) -> list[Tensor]:
    head, d_logits = _whole_back(c)
    return [head.to_weight(d_logits)]


def _whole_db(c: Call) -> list[Tensor]:
    head, d_logits = _whole_back(c)
    return [head.to_bias(d_logits)]


# ---- in parts


def _part_gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
    head = _Head(c, 0)
    return head.gradients(shared_gradient(head, grads[1], grads[2], head.peak()))


def _part_back(c: Call) -> tuple[_Head, Tensor]:
    head = _Head(c, 3)
    return head, shared_gradient(head, *c.args[:3])


def _part_dx(c: Call) -> list[Tensor]:
    head, d_logits = _part_back(c)
    return [head.to_operand(d_logits)]


def _part_dw(c: Call) -> list[Tensor]:
    head, d_logits = _part_back(c)
    return [head.to_weight(d_logits)]


def _part_db(c: Call) -> list[Tensor]:
    head, d_logits = _part_back(c)
    return [head.to_bias(d_logits)]


MEANINGS = {
    "linear_cross_entropy": Semantics(lambda c: [whole(c, _Head(c, 0), c.args[2])], _whole_gradients),
    "linear_cross_entropy_dx": Semantics(_whole_dx),
    "linear_cross_entropy_dw": Semantics(_whole_dw),
    "linear_cross_entropy_db": Semantics(_whole_db),
    "linear_softmax_stats": Semantics(lambda c: parts(c, _Head(c, 0)), _part_gradients),
    "linear_softmax_stats_dx": Semantics(_part_dx),
    "linear_softmax_stats_dw": Semantics(_part_dw),
    "linear_softmax_stats_db": Semantics(_part_db),
}
