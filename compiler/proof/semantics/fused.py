"""Ops that are fused of others mean these, one after the other."""

from collections.abc import Callable, Sequence
from functools import partial

from attrs import evolve, frozen

from ...ir import Attr, Op, Type, Value
from ...ops import OPS
from ...ops.fused import GATES, NORMS
from ..tensors import Tensor
from . import algebra, attention, loss, norm
from .call import Call, Semantics

_PARTS = algebra.MEANINGS | attention.MEANINGS | loss.MEANINGS | norm.MEANINGS


@frozen
class _Node:
    """A value on the way."""

    tensor: Tensor
    type: Type


@frozen
class _Run:
    """Does the ops that a fused op means."""

    fused: Call

    def do(self, kind: str, *operands: _Node, **attrs: Attr) -> Sequence[_Node]:
        """Does an op, with the attributes of the fused op that it has too."""
        entry, (fused, program) = OPS[kind], (self.fused.op, self.fused.program)
        names = {attribute.name for attribute in entry.attributes}
        for key, value in fused.attrs:
            if key in names:
                attrs[key] = value
        types = [node.type for node in operands]
        op = Op(kind, (), (), tuple(attrs.items()), span=fused.span)
        result_types = entry.infer(program, types, op)
        op = evolve(op, outputs=tuple(Value("", type) for type in result_types))
        call = evolve(self.fused, op=op, args=[node.tensor for node in operands], types=types)
        return [*map(_Node, _PARTS[kind].value(call), result_types)]


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
    def value(c: Call) -> list[Tensor]:
        operands = map(_Node, c.args, c.types)
        return [node.tensor for node in body(_Run(c), *operands)]

    return Semantics(value)


MEANINGS = {kind: _meaning(body) for kind, body in BODIES.items()}
