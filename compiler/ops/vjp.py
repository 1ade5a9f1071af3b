"""`vjp`: the gradients of an op's operands, a single op for all kinds of ops; how adjoints write
it, and its types.

`dx: … = vjp(dy, x, weight) <of="rmsnorm", wrt=[x], eps=…>` is the gradient of rmsnorm's x.  It
reads the gradients of the op's results, then the operands and results that gradients are made of
(`Vjp`).  A gradient's type is the dual of its operand's.  Autograd does it, so no program calls
it.  Non-goals: its values (`proof.semantics`).
"""

from collections.abc import Mapping, Sequence
from itertools import count, islice

from attrs import evolve, frozen

from ..ir import BATCH, Attr, Op, Program, Type
from ..ir.placements import dual_type
from ..ir.printer import print_type
from .messages import Message
from .protocol import Attribute, Builder, OpDef, TypingError, Vjp, takes
from .saved_tensors import Local
from .work import Work, memory_work

KIND = "vjp"
ATTRIBUTES = (
    Attribute("of", kinds=(str,)),
    Attribute("wrt", kinds=(tuple,)),
    Attribute("grads", (), 1, (int,)),
)
"""The op's kind, the operands that there are gradients of, and how many results have gradients."""


# ---- writing


def gradients(entry: OpDef, op: Op, grads: Sequence[str], b: Builder) -> Sequence[str | None]:
    """Writes the gradients of an op's operands.

    `grads` are the gradients of its results, "" for a result without one.
    """
    if entry.adjoint:
        return entry.adjoint(op, grads, b)
    assert entry.vjp, f"differentiate: {op.kind} has no gradient"
    inputs: list[int] = []
    weights: list[int] = []
    for operand in entry.vjp.wrt or range(len(op.inputs)):
        if operand < len(op.inputs) and b.is_wanted(op.inputs[operand]):
            if BATCH in b.type(op.inputs[operand]).dims:
                inputs.append(operand)
            else:
                weights.append(operand)
    grad_by_operand = dict[int, str]()
    for wrt in (inputs, weights):  # an op for each: the runtime may put weights off
        if wrt:
            grad_by_operand |= zip(wrt, vjp(entry, op, grads, wrt, b), strict=True)
    return [grad_by_operand.get(operand) for operand in range(len(op.inputs))]


def vjp(
    entry: OpDef, op: Op, grads: Sequence[str], wrt: Sequence[int], b: Builder
) -> tuple[str, ...]:
    """Writes one op for the gradients of the operands `wrt`."""
    assert entry.vjp, f"differentiate: {op.kind} has no vjp"
    result_grads = [grad for grad in grads if grad]
    read = [b.save(name) for i, name in enumerate(op.inputs) if i not in entry.vjp.unread]
    if entry.vjp.result:
        read.append(b.save(op.outputs[0].name))
    attrs: dict[str, Attr] = {"of": op.kind, "wrt": tuple(_name(entry, i) for i in wrt)}
    if len(result_grads) > 1:
        attrs["grads"] = len(result_grads)
    like = [op.inputs[i] for i in wrt]
    return b.emit(KIND, [*result_grads, *read], like, **attrs, **dict(op.attrs))


def _name(entry: OpDef, operand: int) -> str:
    """The name of an operand.

    An op that takes any number of operands has no names for the further ones: they are numbered.
    """
    last = len(entry.operands) - 1
    if operand <= last:
        return entry.operands[operand].name
    return f"{entry.operands[last].name}.{operand - last}"


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

    op     the op that it is the gradient of, without results; "" for operands that are not read
    types  of the operands of that op
    wrt    the operands that it makes the gradients of
    grads  how many of the op's results it reads the gradients of
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
    """The entry of `vjp`, made from the entries `of` all ops that it may be the gradients of.

    These are by the names of the ops.
    """

    entries: Mapping[str, OpDef]

    def entry(self) -> OpDef:
        """The entry."""
        return OpDef(
            KIND,
            "The gradients of operands of the op `of`: d(Σ dy · y) / d(operand), of the"
            " results' gradients dy.",
            operands=takes("dy"),
            attributes=ATTRIBUTES,
            variadic=True,
            typing=self._grad_types,
            workspace=self._workspace,
            may_delay=self.may_delay,
            communicates=self._messages,
            work=self._work,
        )

    def attributes(self, op: Op) -> tuple[Attribute, ...]:
        """The attributes that an op may have besides the ones in its own entry: a `vjp` has the
        attributes of the op that it is of.
        """
        if op.kind != KIND:
            return ()
        entry = self.entries.get(str(dict(op.attrs).get("of")))
        return entry.attributes if entry else ()

    def forward(self, op: Op, types: Sequence[Type]) -> tuple[Op, tuple[Type, ...]]:
        """The op that a `vjp` is of and the types of its operands; of any other op, itself and
        its own.
        """
        if op.kind != KIND:
            return op, tuple(types)
        pulled = self.take_apart(op, types)
        return pulled.op, pulled.types

    def may_delay(self, op: Op) -> bool:
        """Whether an op makes gradients of weights that the runtime may put off."""
        vjp = self._get_vjp(op)
        if not vjp or not vjp.delayed:
            return False
        return all(BATCH not in value.type.dims for value in op.outputs)

    def get_gradients_from_forward(self, op: Op) -> Mapping[str, str]:
        """By operand, the name of the saved gradient that an op only scales where it lies; none for
        an op that makes its gradients itself.
        """
        vjp = self._get_vjp(op)
        return vjp.from_forward if vjp else {}

    def _get_vjp(self, op: Op) -> Vjp | None:
        """How a `vjp` makes gradients; None for any other op."""
        return self.entries[str(op.get("of"))].vjp if op.kind == KIND else None

    def take_apart(self, op: Op, types: Sequence[Type]) -> Pulled:
        """A `vjp` with operands of these types, taken apart.  Raises TypingError."""
        entry = self.entries.get(str(op.get("of")))
        if not entry or not entry.vjp:
            raise TypingError(f"{op.get('of')} is no op that has a vjp")
        wrt = tuple(_place(entry, name) for name in op.names("wrt"))
        grads = int(str(dict(op.attrs).get("grads", 1)))
        reads = len(types) - grads - entry.vjp.result
        readable = (i for i in count() if i not in entry.vjp.unread)
        read = tuple(islice(readable, max(reads, 0)))
        # an operand that is read has its own type; any other the dual of its gradient's type
        type_by_operand: dict[int, Type] = {}
        for i, value in zip(wrt, op.outputs, strict=False):
            type_by_operand[i] = dual_type(value.type)
        type_by_operand |= dict(zip(read, types[grads:], strict=False))
        operands = tuple(type_by_operand[i] for i in sorted(type_by_operand))
        allowed = entry.vjp.wrt or range(len(operands))
        has_gaps = sorted(type_by_operand) != [*range(len(operands))]
        if has_gaps or not {*wrt} <= {*allowed} or not entry.fits(len(operands)):
            raise TypingError(f"these are no operands of the vjp of {entry.name}")
        attrs = tuple((key, value) for key, value in op.attrs if key not in ("of", "wrt", "grads"))
        names = dict(zip(read, op.inputs[grads:], strict=False))
        inputs = tuple(names.get(i, "") for i in range(len(operands)))
        forward = Op(entry.name, inputs, (), attrs, span=op.span)
        return Pulled(forward, operands, wrt, grads, read, entry.vjp)

    def _grad_types(self, program: Program, types: Sequence[Type], op: Op) -> Sequence[Type]:
        """The types of the gradients.

        Raises TypingError unless `types` are the types of all that the gradients are made of.
        """
        pulled = self.take_apart(op, types)
        entry = self.entries[pulled.op.kind]
        results = entry.infer(program, pulled.types, pulled.op)
        expected = [dual_type(type) for type in results if type.differentiable]
        expected += [pulled.types[i] for i in pulled.read]
        if pulled.vjp.result:
            expected += results[:1]
        if [*types] != expected:
            wanted, actual = ", ".join(map(print_type, expected)), ", ".join(map(print_type, types))
            raise TypingError(f"the vjp of {entry.name} takes {wanted}, not {actual}")
        if not all(pulled.types[i].differentiable for i in pulled.wrt):
            raise TypingError(
                f"there is no gradient of {entry.name}'s {', '.join(op.names('wrt'))}"
            )
        return [dual_type(pulled.types[i]) for i in pulled.wrt]

    def _workspace(self, local: Local) -> int:
        """The workspace for gradients of inputs; gradients of weights are computed beside them."""
        pulled = self.take_apart(local.op, local.types)
        if 0 not in pulled.wrt:
            return 0
        return pulled.vjp.workspace(evolve(local, op=pulled.op, types=pulled.types))

    def _messages(self, local: Local) -> tuple[Message, ...]:
        """The messages for gradients of inputs; gradients of weights, which the runtime may delay,
        send nothing.
        """
        pulled, outputs = self.take_apart(local.op, local.types), local.op.outputs
        if not pulled.vjp.communicates or all(BATCH not in value.type.dims for value in outputs):
            return ()
        wanted = tuple(i in pulled.wrt for i in range(len(pulled.types)))
        op = evolve(pulled.op, outputs=outputs)
        return pulled.vjp.communicates(evolve(local, op=op, types=pulled.types, wanted=wanted))

    def _work(self, local: Local) -> Work:
        """The work of making the gradients, by the entry of the op that it is of."""
        pulled = self.take_apart(local.op, local.types)
        if pulled.vjp.work is memory_work:
            return memory_work(local)
        op = evolve(pulled.op, outputs=local.op.outputs)
        return pulled.vjp.work(evolve(local, op=op, types=pulled.types))
