"""The cost of a body: operations of its forward and of the two parts of its backward, counted to
balance stages.

Non-goals: times (they need a machine).  An op that costs no more than reading its operands counts
an operation for each element, next to nothing against matrix products.  Attention counts the
pairs of query and key that its mask lets through, whatever a kernel computes besides; documents,
whose lengths no plan says, count as one.
"""

from collections.abc import Sequence
from math import prod

from attrs import evolve, frozen

from ..ir import BATCH, Op, Program, Region, Stmt
from ..ops import roles
from ..ops.attention import seen_pairs, window_of


@frozen
class Cost:
    """Operations, on all ranks together."""

    forward: int = 0
    input: int = 0
    """Operations for the gradients that the stage before waits for."""
    weight: int = 0
    """Operations for the gradients of weights, which no stage waits for."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.forward + other.forward, self.input + other.input, self.weight + other.weight
        )

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.forward * times, self.input * times, self.weight * times)


def cost(program: Program, body: Sequence[Stmt]) -> Cost:
    """The cost of one run of a body of `program`."""
    total = Cost()
    for stmt in body:
        if isinstance(stmt, Region):
            total += cost(program, stmt.body) * program.size(stmt.dim)
        else:
            total += _cost(program, stmt)
    return total


def _cost(program: Program, op: Op) -> Cost:
    """The gradient of a product's operand costs what the product does; an operand without
    samples is a weight.
    """
    types = program.types
    # elements of the results, on all ranks together
    elements = sum(program.elements(evolve(value.type, places=())) for value in op.outputs)
    match op.kind:
        case "leaf":
            return Cost()
        case "contract" | "grouped_contract":
            product = 2 * elements * prod(map(program.size, op.names("over")))
            weights = sum(BATCH not in types[name].dims for name in op.inputs[:2])
            return Cost(product, product * (2 - weights), product * weights)
        case "contracts":
            product = 2 * elements * prod(map(program.size, op.names("over")))
            return Cost(product, product, product)
        case "linear_cross_entropy" | "linear_softmax_stats":
            dims = {*types[op.inputs[0]].dims, *types[op.inputs[1]].dims}
            product = 2 * prod(map(program.size, dims))
            if op.kind == "linear_softmax_stats":
                return Cost(product, 2 * product, product)  # backward recomputes logits
            return Cost(3 * product)  # forward computes gradients
        case _ if keys := roles(op, types).key_seq:
            pairs = seen_pairs(program.size(keys), op.get("mask") == "causal", window_of(op))
            q, _, v = (program.size(types[name].dims[-1]) for name in op.inputs[:3])
            products = 2 * (q + v) * (elements // v // program.size(keys)) * pairs
            return Cost(products, 2 * products)
        case _:
            return Cost(elements, elements)
