"""`vjp`: the gradients of an op's operands, a single op for those of all kinds; how adjoints write
it, and its types.

`dx: … = vjp(dy, x, weight) <of="rmsnorm", wrt=[x], eps=…>` is the gradient of rmsnorm's x.  It
reads the gradients of the op's results, then what of its operands and results gradients are made of
(`Vjp`).  A gradient's type is the dual of its operand's.  Autograd does it, so no program calls
it.  Non-goals: its values (`proof.semantics`).
"""

from collections.abc import Mapping, Sequence
from itertools import count, islice

from attrs import evolve, frozen

from ..ir import BATCH, Op, Program, Type
from ..ir.placements import dual_type
from ..ir.printer import print_type
from .messages import Message
from .protocol import Attribute, Builder, OpDef, TypingError, Vjp, takes
from .saved_tensors import Local
from .work import Work, moved

KIND = "vjp"
ATTRIBUTES = (
    Attribute("of", kinds=(str,)),
    Attribute("wrt", kinds=(tuple,)),
    Attribute("grads", (), 1, (int,)),
)
"""The op's kind, the operands that there are gradients of, and of how many results gradients
are given.
"""


# ---- writing


def gradients(entry: OpDef, op: Op, grads: Sequence[str], b: Builder) -> Sequence[str | None]:
    """Writes the gradients of an op's operands, from those of its results, "" for one without."""
    if entry.adjoint:
        return entry.adjoint(op, grads, b)
    assert entry.vjp, f"differentiate: {op.kind} has no gradient"
    grad_by_operand = dict[int, str]()
    wanted = [
        i
        for i in entry.vjp.wrt or range(len(op.inputs))
        if i < len(op.inputs) and b.wanted(op.inputs[i])
    ]
    weights = [i for i in wanted if BATCH not in b.type(op.inputs[i]).dims]
    for wrt in ([i for i in wanted if i not in weights], weights):
        grad_by_operand |= zip(wrt, vjp(entry, op, grads, wrt, b), strict=True) if wrt else ()
    return [grad_by_operand.get(i) for i in range(len(op.inputs))]


def vjp(
    entry: OpDef, op: Op, grads: Sequence[str], wrt: Sequence[int], b: Builder
) -> tuple[str, ...]:
    """Writes one op for the gradients of the operands `wrt`."""
    assert entry.vjp, f"differentiate: {op.kind} has no vjp"
    result_grads = [grad for grad in grads if grad]
    read = [b.saved(name) for i, name in enumerate(op.inputs) if i not in entry.vjp.unread]
    read += [b.saved(op.outputs[0].name)] if entry.vjp.result else []
    attrs = {"of": op.kind, "wrt": tuple(_name(entry, i) for i in wrt)}
    several = {"grads": len(result_grads)} if len(result_grads) > 1 else {}
    return b.emit(
        KIND, [*result_grads, *read], [op.inputs[i] for i in wrt], **attrs, **several, **dict(op.attrs)
    )


def _name(entry: OpDef, operand: int) -> str:
    """The name of an operand; of an op that takes any number, those after the last are numbered."""
    last = len(entry.operands) - 1
    return entry.operands[min(operand, last)].name + (
        f".{operand - last}" if operand > last else ""
    )


def _place(entry: OpDef, name: str) -> int:
    stem, _, number = name.partition(".")
    names = [operand.name for operand in entry.operands]
    if stem not in names:
        raise TypingError(f"{entry.name} has no operand {name}")
    return names.index(stem) + int(number or 0)


# ---- reading


@frozen
class Pulled:
    """An op `vjp`, taken apart.

    op     the op that it is the gradient of, without results, and the types of its operands; "" for
           those not read
    wrt    the operands that it makes the gradients of
    grads  the number of results whose gradients it is given
    read   the operands that it reads
    vjp    how they are made
    """

    op: Op
    types: tuple[Type, ...]
    wrt: tuple[int, ...]
    grads: int
    read: tuple[int, ...]
    vjp: Vjp


@frozen
class Vjps:
    """The entry of `vjp` as the entries of the ops make it that it is of, by name."""

    of: Mapping[str, OpDef]

    def entry(self) -> OpDef:
        """The entry."""
        return OpDef(
            KIND,
            "The gradients of operands of the op `of`: d(Σ dy · y) / d(operand), of the"
            " results' gradients dy.",
            operands=takes("dy"),
            attributes=ATTRIBUTES,
            variadic=True,
            typing=self._typed,
            workspace=self._workspace,
            communicates=self._messages,
            work=self._work,
        )

    def attributes(self, op: Op) -> tuple[Attribute, ...]:
        """The attributes that an op may have besides those of its own entry: a `vjp`, those of
        the op that it is of.
        """
        entry = self.of.get(str(dict(op.attrs).get("of")))
        return entry.attributes if op.kind == KIND and entry else ()

    def forward(self, op: Op, types: Sequence[Type]) -> tuple[Op, tuple[Type, ...]]:
        """The op that a `vjp` is of and the types of its operands; of any other op, itself and
        its own.
        """
        if op.kind != KIND:
            return op, tuple(types)
        pulled = self.pulled(op, types)
        return pulled.op, pulled.types

    def delayed(self, op: Op) -> bool:
        """Whether an op makes gradients of weights that the runtime may put off."""
        entry_vjp = self.of[str(op.get("of"))].vjp if op.kind == KIND else None
        return bool(entry_vjp and entry_vjp.delayed) and not any(BATCH in value.type.dims for value in op.outputs)

    def pulled(self, op: Op, types: Sequence[Type]) -> Pulled:
        """A `vjp` with operands of these types, taken apart.  Raises TypingError."""
        entry = self.of.get(str(op.get("of")))
        if not entry or not entry.vjp:
            raise TypingError(f"{op.get('of')} is no op that has a vjp")
        wrt = tuple(_place(entry, name) for name in op.names("wrt"))
        grads = int(str(dict(op.attrs).get("grads", 1)))
        reads = len(types) - grads - entry.vjp.result
        read = tuple(islice((i for i in count() if i not in entry.vjp.unread), max(reads, 0)))
        known = {i: dual_type(value.type) for i, value in zip(wrt, op.outputs, strict=False)}
        known |= dict(zip(read, types[grads:], strict=False))
        operands = tuple(known[i] for i in sorted(known))
        allowed = entry.vjp.wrt or range(len(operands))
        if (
            [*sorted(known)] != [*range(len(known))]
            or not {*wrt} <= {*allowed}
            or not entry.fits(len(operands))
        ):
            raise TypingError(f"these are no operands of the vjp of {entry.name}")
        attrs = tuple((key, value) for key, value in op.attrs if key not in ("of", "wrt", "grads"))
        names = dict(zip(read, op.inputs[grads:], strict=False))
        inputs = tuple(names.get(i, "") for i in range(len(operands)))
        return Pulled(
            Op(entry.name, inputs, (), attrs, span=op.span), operands, wrt, grads, read, entry.vjp
        )

    def _typed(self, program: Program, types: Sequence[Type], op: Op) -> Sequence[Type]:
        pulled = self.pulled(op, types)
        entry = self.of[pulled.op.kind]
        results = entry.infer(program, pulled.types, pulled.op)
        due = [dual_type(type) for type in results if type.differentiable]
        due += [*(pulled.types[i] for i in pulled.read), *(results[:1] if pulled.vjp.result else ())]
        if [*types] != due:
            words = (", ".join(map(print_type, each)) for each in (due, types))
            raise TypingError("the vjp of {} takes {}, not {}".format(entry.name, *words))
        if not all(pulled.types[i].differentiable for i in pulled.wrt):
            raise TypingError(
                f"there is no gradient of {entry.name}'s {', '.join(op.names('wrt'))}"
            )
        return [dual_type(pulled.types[i]) for i in pulled.wrt]

    def _workspace(self, local: Local) -> int:
        """The workspace for gradients of inputs; those of weights are computed beside them."""
        pulled = self.pulled(local.op, local.types)
        return pulled.vjp.workspace(evolve(local, op=pulled.op, types=pulled.types)) if 0 in pulled.wrt else 0

    def _messages(self, local: Local) -> tuple[Message, ...]:
        """The messages for gradients of inputs; those of weights, which the runtime may delay,
        send nothing.
        """
        pulled, outputs = self.pulled(local.op, local.types), local.op.outputs
        if not pulled.vjp.communicates or all(BATCH not in value.type.dims for value in outputs):
            return ()
        wanted = tuple(i in pulled.wrt for i in range(len(pulled.types)))
        return pulled.vjp.communicates(
            evolve(local, op=evolve(pulled.op, outputs=outputs), types=pulled.types, wanted=wanted)
        )

    def _work(self, local: Local) -> Work:
        """The entry's, of the op that it is of."""
        pulled = self.pulled(local.op, local.types)
        if pulled.vjp.work is moved:
            return moved(local)
        return pulled.vjp.work(
            evolve(local, op=evolve(pulled.op, outputs=local.op.outputs), types=pulled.types)
        )
