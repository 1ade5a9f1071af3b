"""Cross entropy in one pass over its logits or, with `logits = chunk`, of their product: no logits
are saved.

A whole vocabulary takes one op.  With a sharded one, each rank's largest logit comes with its sums;
ranks learn the largest logit of all from these, and sums are rescaled to it afterwards.
"""

from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from ...config.settings import CHUNK
from ...ir import Attr, Op, Stmt, Value
from ...ops import OPS
from ...ops.fused_loss import LINEAR_CROSS_ENTROPY
from ...ops.fused_parallel_loss import LINEAR_PARTS, LOGIT_PARTS, REJOINED
from ...ops.loss import CAP, CROSS_ENTROPY, SMOOTHING
from .context import FusionContext, replace_ops

Attrs = tuple[tuple[str, Attr], ...]


@frozen
class _LogitOrigin:
    """The origin of logits: places of the ops that a loss takes in, its operands in place of
    logits, and the ops.
    """

    places: tuple[int, ...]
    operands: tuple[str, ...]
    bias: tuple[str, ...] = ()
    inner: Attrs = ()
    cap: Attrs = ()

    @property
    def is_product(self) -> bool:
        """Whether a product is taken in."""
        return bool(self.inner)


def heads(body: tuple[Stmt, ...], known: FusionContext) -> tuple[Stmt, ...]:
    """Fuses losses with what makes their logits and serves nothing else."""
    makers, chunks = _Makers(body, known), known.program.train.logits == CHUNK
    by: dict[int, Op | None] = {}
    for index, op in known.ops(body, CROSS_ENTROPY.name):
        # sums of gradients before the loss' factor would overflow
        narrow = known.types[op.inputs[0]].dtype == "f16"
        if origin := makers.origin_of(op.inputs[0], 1, products=chunks and not narrow):
            by |= dict.fromkeys(origin.places, None)
            by[index] = _whole(origin, op)
    largest = _largest(body, known)
    for index, op in known.ops(body, "local_softmax_stats"):
        first, max_logit = largest.get(op.inputs[1], (0, None))
        if max_logit and max_logit.inputs == op.inputs[:1] and first not in by:
            origin = makers.origin_of(op.inputs[0], 2, products=chunks) or _LogitOrigin(
                (), op.inputs[:1]
            )
            by |= dict.fromkeys(origin.places, None)
            by[first], by[index] = _in_parts(origin, max_logit, op, known)
    return replace_ops(body, by)


def _largest(body: Sequence[Stmt], known: FusionContext) -> Mapping[str, tuple[int, Op]]:
    """The ops that compute ranks' own maxima, with their place, by the names of the largest of
    all.
    """
    maxima = known.ops_by_result(body, "max_logit")
    largest = dict[str, tuple[int, Op]]()
    for _, op in known.ops(body, "coerce"):
        if op.inputs[0] in maxima:
            largest[op.outputs[0].name] = maxima[op.inputs[0]]
    return largest


class _Makers:
    """The ops of a body that may make logits."""

    def __init__(self, body: Sequence[Stmt], known: FusionContext) -> None:
        self._known = known
        self._ops = known.ops_by_result(body, "add", "contract", "softcap")

    def origin_of(self, logits: str, users: int, *, products: bool) -> _LogitOrigin | None:
        """The origin of logits that `users` ops read; None where others read them too, or no
        such ops make them.
        """
        cap = self._only(logits, users, "softcap")
        if not cap:
            return self._product(logits, users) if products else None
        index, op = cap
        origin = None
        if products:
            origin = self._product(op.inputs[0], 1)
        origin = origin or _LogitOrigin((), op.inputs)
        return evolve(origin, places=(*origin.places, index), cap=((CAP.name, op.get("cap")),))

    def _product(self, logits: str, users: int) -> _LogitOrigin | None:
        """A product with a parameter; another parameter of the classes alone may be added to it."""
        if not (sum_ := self._only(logits, users, "add")):
            return self._alone(logits, users)
        (index, op), classes = sum_, self._known.types[logits].dims[-1:]
        biases, others = set[str](), list[str]()
        for name in op.inputs:
            of_classes = self._known.types[name].dims == classes
            if of_classes and name in self._known.parameters:
                biases.add(name)
            else:
                others.append(name)
        if len(biases) != 1 or len(others) != 1 or not (origin := self._alone(others[0], 1)):
            return None
        return evolve(origin, places=(*origin.places, index), bias=(*biases,))

    def _alone(self, logits: str, users: int) -> _LogitOrigin | None:
        """A product with a parameter of one dim besides the dims that are contracted."""
        if not (product := self._only(logits, users, "contract")):
            return None
        index, op = product
        over, weight = op.names("over"), op.inputs[1]
        if weight not in self._known.parameters or self._known.types[weight].dims[1:] != over:
            return None
        return _LogitOrigin((index,), op.inputs, inner=(("inner", over),))

    def _only(self, logits: str, users: int, kind: str) -> tuple[int, Op] | None:
        """The op of this kind, with its place, that makes a value for `users` uses and no more."""
        index, op = self._ops.get(logits, (0, None))
        if not op or op.kind != kind or self._known.uses[logits] != users:
            return None
        return index, op


def _select_attrs(op: Op, *names: str) -> Attrs:
    return tuple((name, value) for name, value in op.attrs if name in names)


def _whole(origin: _LogitOrigin, loss: Op) -> Op:
    kind = LINEAR_CROSS_ENTROPY.name if origin.is_product else loss.kind
    attrs = (*origin.inner, *_select_attrs(loss, SMOOTHING.name, "z"), *origin.cap)
    return evolve(
        loss, kind=kind, inputs=(*origin.operands, loss.inputs[1], *origin.bias), attrs=attrs
    )


def _in_parts(origin: _LogitOrigin, largest: Op, parts: Op, known: FusionContext) -> tuple[Op, Op]:
    """The parts of each rank's classes, and the op that relates them to the largest logit."""
    (logits, peak, labels), (m,), (z, t) = parts.inputs, largest.outputs, parts.outputs
    classes, smoothing = known.types[logits].dims[-1], _select_attrs(parts, SMOOTHING.name)
    shares = _shares(classes, known.types[logits].axes_of(classes), largest, known)
    kind = (LINEAR_PARTS if origin.is_product else LOGIT_PARTS).name
    inputs = (*origin.operands, labels, *origin.bias)
    attrs = (*origin.inner, *smoothing, *origin.cap, ("as", shares))
    first = Op(kind, inputs, (), attrs, span=parts.span)
    operands = [known.types[name] for name in inputs]
    types = OPS[kind].infer(known.program_with_dims, operands, first)
    names = (m.name, known.names.fresh(z.name), known.names.fresh(t.name))
    first = evolve(first, outputs=tuple(map(Value, names, types)))
    joined = (*smoothing, ("classes", classes))
    return first, Op(REJOINED.name, (*names, peak, labels), parts.outputs, joined, span=parts.span)


def _shares(classes: str, axes: tuple[str, ...], parts: Op, known: FusionContext) -> str:
    """A dim of one for each rank that has a part of the classes."""
    return known.dim(f"{classes}_shares", known.program.degree(axes), parts.span)
