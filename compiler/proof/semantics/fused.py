"""Ops that are fused of others mean these, one after the other; gradients go from the last to
the first.
"""

from collections.abc import Callable, Sequence
from functools import partial

from attrs import Factory, evolve, frozen

from ...ir import Attr, Op, Type, Value
from ...ops import OPS
from ...ops.fused import GATES, NORMS
from ..tensors import Tensor
from . import algebra, attention, loss, norm
from .call import Call, Semantics

_PARTS = algebra.MEANINGS | attention.MEANINGS | loss.MEANINGS | norm.MEANINGS


@frozen(eq=False)
class _Node:
    """A value on the way, and the parts of its gradient as far as they are known."""

    tensor: Tensor
    type: Type
    grads: list[Tensor] = Factory(list[Tensor])


_Done = tuple[Call, Sequence[_Node], Sequence[_Node]]


@frozen
class _Run:
    """A fused op and its operands, and the ops that have been done, each with what it took and
    made.
    """

    fused: Call
    operands: Sequence[_Node]
    done: list[_Done] = Factory(list[_Done])

    def do(self, kind: str, *operands: _Node, **attrs: Attr) -> Sequence[_Node]:
        """Does an op, with the attributes of the fused op that it has too."""
        entry, (fused, program) = OPS[kind], (self.fused.op, self.fused.program)
        names = {attribute.name for attribute in entry.attributes}
        for key, value in fused.attrs:
            if key in names:
                attrs[key] = value
        types = [node.type for node in operands]
        args = [node.tensor for node in operands]
        op = Op(kind, (), (), tuple(attrs.items()), span=fused.span)
        op = evolve(op, outputs=tuple(Value("", type) for type in entry.infer(program, types, op)))
        call = evolve(self.fused, op=op, args=args, types=types, results=(), wrt=None)
        call = evolve(call, results=_PARTS[kind].value(call))
        results = list[_Node]()
        for tensor, value in zip(call.results, op.outputs, strict=True):
            results.append(_Node(tensor, value.type))
        self.done.append((call, operands, results))
        return results

    def gradients(self, results: Sequence[_Node], grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the operands, from the gradients of the last results."""
        for result, grad in zip(results[-len(grads) :], grads, strict=True):
            result.grads.append(grad)
        for call, operands, outputs in reversed(self.done):
            pull = _PARTS[call.op.kind].gradients
            due = [grad for node in outputs if (grad := self._total(node))]
            assert pull, f"verify: {call.op.kind} has no gradients"
            for node, grad in zip(operands, pull(call, due), strict=True):
                if grad:
                    node.grads.append(grad)
        return [*map(self._total, self.operands)]

    def _total(self, node: _Node) -> Tensor | None:
        if not node.grads:
            return None
        return self.fused.numbers.total(node.tensor.dims, *node.grads)


Body = Callable[..., Sequence[_Node]]
"""Does on a run what a fused op does to the operands; gives the results."""


def _norm(run: _Run, x: _Node, y: _Node, *weights: _Node, norm: str) -> Sequence[_Node]:
    (total,) = run.do("add", x, y)
    return total, *run.do(norm, total, *weights)


def _products(run: _Run, x: _Node, *weights: _Node) -> Sequence[_Node]:
    return [result for weight in weights for result in run.do("contract", x, weight)]


def _loss(
    run: _Run, x: _Node, weight: _Node, labels: _Node, *bias: _Node, loss: str
) -> Sequence[_Node]:
    logits = run.do("contract", x, weight, over=run.fused.op.names("inner"))
    if bias:
        logits = run.do("add", *logits, *bias)
    return run.do(loss, *logits, labels)


def _gate(run: _Run, x: _Node, y: _Node, function: str) -> Sequence[_Node]:
    return run.do("mul", *run.do(function, x), y)


def _ropes(run: _Run, q: _Node, k: _Node) -> Sequence[_Node]:
    return *run.do("rope", q), *run.do("rope", k)


BODIES: dict[str, Body] = {
    **{added: partial(_norm, norm=norm) for norm, added in NORMS.items()},
    **{gate: partial(_gate, function=function) for function, gate in GATES.items()},
    "contracts": _products,
    "linear_cross_entropy": partial(_loss, loss="cross_entropy"),
    "linear_softmax_stats": partial(_loss, loss="logit_softmax_stats"),
    "rope_pair": _ropes,
}


def _meaning(body: Body) -> Semantics:
    def run(c: Call) -> tuple[_Run, Sequence[_Node]]:
        run = _Run(c, [*map(_Node, c.args, c.types)])
        return run, body(run, *run.operands)

    def gradients(c: Call, grads: list[Tensor]) -> list[Tensor | None]:
        done, results = run(c)
        return done.gradients(results, grads)

    return Semantics(lambda c: [node.tensor for node in run(c)[1]], gradients)


MEANINGS = {kind: _meaning(body) for kind, body in BODIES.items()}
