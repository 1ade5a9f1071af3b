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
        """Does an op, with those of the fused op's attributes that it has too."""
        entry, (op, program) = OPS[kind], (self.fused.op, self.fused.program)
        attrs |= {
            key: value for key, value in op.attrs if key in {each.name for each in entry.attributes}
        }
        op, types = (
            Op(kind, (), (), tuple(attrs.items()), span=op.span),
            [it.type for it in operands],
        )
        op = evolve(op, outputs=tuple(Value("", type) for type in entry.infer(program, types, op)))
        call = evolve(
            self.fused,
            op=op,
            args=[it.tensor for it in operands],
            types=types,
            results=(),
            wrt=None,
        )
        call = evolve(call, results=_PARTS[kind].value(call))
        made = [
            _Node(tensor, value.type)
            for tensor, value in zip(call.results, op.outputs, strict=True)
        ]
        self.done.append((call, operands, made))
        return made

    def gradients(self, results: Sequence[_Node], grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the operands, from those of the last results."""
        for result, grad in zip(results[-len(grads) :], grads, strict=True):
            result.grads.append(grad)
        for call, taken, made in reversed(self.done):
            pull, due = (
                _PARTS[call.op.kind].gradients,
                [grad for node in made if (grad := self._total(node))],
            )
            assert pull, f"verify: {call.op.kind} has no gradients"
            for node, grad in zip(taken, pull(call, due), strict=True):
                node.grads.extend([grad] if grad else [])
        return [*map(self._total, self.operands)]

    def _total(self, node: _Node) -> Tensor | None:
        return self.fused.numbers.total(node.tensor.dims, *node.grads) if node.grads else None


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
    return run.do(loss, *(run.do("add", *logits, *bias) if bias else logits), labels)


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
