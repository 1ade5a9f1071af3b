"""The last product and its cross entropy: no logits are held.

Of a whole vocabulary that is one op.  Of one that ranks share out, the largest logit, from which they learn the largest
of all, comes with the sums; these are brought to it afterwards.
"""

from collections.abc import Sequence

from attrs import evolve, frozen

from ...ir import Attr, Dim, Op, Stmt, Value
from ...ops import OPS
from ...ops.head import LINEAR_CROSS_ENTROPY, LINEAR_PARTS, REJOINED
from ...ops.loss import SMOOTHING
from .known import Known, replaced


@frozen
class _Head:
    """The ops that make logits: a product, and perhaps a cap; where they stand, and what they are together."""

    places: tuple[int, ...]
    product: Op
    cap: tuple[tuple[str, Attr], ...]

    @property
    def inner(self) -> tuple[tuple[str, Attr], ...]:
        """What is contracted."""
        return (("inner", self.product.names("over")),)


def heads(body: tuple[Stmt, ...], known: Known) -> tuple[Stmt, ...]:
    """Fuses heads whose logits serve a loss alone."""
    found = _heads(body, known)
    by: dict[int, Op | None] = {}
    for at, op in known.ops(body, "cross_entropy"):
        narrow = known.types[op.inputs[0]].dtype == "f16"  # sums of gradients before the loss' factor would overflow
        if (head := found.get(op.inputs[0])) and known.uses[op.inputs[0]] == 1 and not narrow:
            by |= dict.fromkeys(head.places, None)
            by[at] = _whole(head, op)
    for at, op in known.ops(body, "softmax_parts"):
        if (head := found.get(op.inputs[0])) and known.uses[op.inputs[0]] == 2:
            first = next((each for each in known.ops(body, "max_logit") if each[1].inputs == op.inputs[:1]), None)
            if first:
                by |= dict.fromkeys(head.places, None)
                by[first[0]], by[at] = _in_parts(head, first[1], op, known)
    return replaced(body, by)


def _heads(body: Sequence[Stmt], known: Known) -> dict[str, _Head]:
    """By the names of their logits: products with a parameter of one dim besides those that are contracted."""
    found: dict[str, _Head] = {}
    for at, op in known.ops(body, "contract"):
        weight = op.inputs[1]
        if weight in known.parameters and known.types[weight].dims[1:] == op.names("over"):
            found[op.outputs[0].name] = _Head((at,), op, ())
    for at, op in known.ops(body, "softcap"):
        if (head := found.get(op.inputs[0])) and known.uses[op.inputs[0]] == 1:
            found[op.outputs[0].name] = evolve(head, places=(*head.places, at), cap=op.attrs)
    return found


def _given(op: Op, *names: str) -> tuple[tuple[str, Attr], ...]:
    return tuple((name, value) for name, value in op.attrs if name in names)


def _whole(head: _Head, loss: Op) -> Op:
    attrs = (*head.inner, *_given(loss, SMOOTHING.name, "z"), *head.cap)
    return evolve(loss, kind=LINEAR_CROSS_ENTROPY.name, inputs=(*head.product.inputs, loss.inputs[1]), attrs=attrs)


def _in_parts(head: _Head, largest: Op, parts: Op, known: Known) -> tuple[Op, Op]:
    """The parts of each rank's classes, and what they are in terms of the largest logit of all."""
    (logits, peak, labels), (m,), (z, t) = parts.inputs, largest.outputs, parts.outputs
    classes, smoothing = known.types[logits].dims[-1], _given(parts, SMOOTHING.name)
    shares = _shares(classes, known.types[logits].axes_of(classes), head.product, known)
    attrs = (*head.inner, *smoothing, *head.cap, ("as", shares))
    inputs = (*head.product.inputs, labels)
    first = Op(LINEAR_PARTS.name, inputs, (), attrs, span=parts.span)
    own = OPS[first.kind].infer(known.program_with_dims, [known.types[name] for name in inputs], first)
    names = (m.name, known.names.fresh(z.name), known.names.fresh(t.name))
    first = evolve(first, outputs=tuple(map(Value, names, own)))
    joined = (*smoothing, ("classes", classes))
    return first, Op(REJOINED.name, (*names, peak, labels), parts.outputs, joined, span=parts.span)


def _shares(classes: str, axes: tuple[str, ...], product: Op, known: Known) -> str:
    """A dim of one for each rank that has a part of the classes."""
    name, own = f"{classes}_shares", {dim.name for dim in known.program.dims}
    while name in own:  # the plan's
        name += "_"
    if name not in {dim.name for dim in known.dims}:
        known.dims.append(Dim(name, known.program.degree(axes), span=product.span))
    return name
