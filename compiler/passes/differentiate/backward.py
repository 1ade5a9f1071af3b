"""The backward of a body: each op's adjoint, last op first; a repeat becomes a repeat from the last
layer to the first.

Adjoints read values of forward, which were saved or are recomputed (`analysis.recompute`): op by op
where each is first read; or, in repeats whose layers are recomputed, all ops up to the one that is
read, where it is first read.

Non-goals: the step around it (`step`).
"""

from collections.abc import Sequence

from attrs import evolve

from ...analysis.recompute import is_recomputed, recomputes_layers, recomputes_region
from ...ir import (
    FLOATS,
    Arg,
    Attr,
    Enter,
    Leave,
    Op,
    Region,
    Stmt,
    Type,
    Value,
    Yield,
    defs,
    regions_in,
)
from ...ir.placements import Step, conjugate, dual_type, ends
from ...ops import OPS, gradients
from ...ops.builder import OpBuilder
from ...ops.saved_tensors import Local
from ..overlap_exchanges import weights_beside


def gradient_name(name: str) -> str:
    """The name of the gradient of `name`."""
    return f"d_{name}"


class Backward(OpBuilder):
    """Writes the backward of one body; the `Builder` that adjoints write with."""

    def __init__(self, outer: OpBuilder) -> None:
        super().__init__(outer.program, outer)
        self._parts: dict[str, list[str]] = {}  # the gradients of a value, as far as they are known
        self._made_by: dict[str, Op] = {}
        self._saved: dict[str, str] = {}  # forward values as this body reads them

    # ---- the Builder of the op protocol

    def emit(
        self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr
    ) -> tuple[str, ...]:
        due = [Value(gradient_name(name), dual_type(self.type(name))) for name in like]
        return self.append_typed(
            Op(kind, tuple(inputs), tuple(due), tuple(attrs.items()), span=self.span)
        )

    def type(self, name: str) -> Type:
        return self.types[name]

    def is_wanted(self, name: str) -> bool:
        return self.type(name).dtype in FLOATS

    def maker(self, name: str) -> Op:
        return self._made_by[name]

    def save(self, name: str) -> str:
        """How this body reads a forward value: recomputed if the plan says so, else saved."""
        if name not in self._saved:
            op = self._made_by.get(name)
            if op and not OPS[op.kind].decides and self.recomputes(op):
                self._recompute(op)
            else:
                self._saved[name] = self.get_saved(name)
        return self._saved[name]

    def recomputes(self, op: Op) -> bool:
        """Whether this body recomputes an op's results."""
        return is_recomputed(self.program, op)

    def _recompute(self, op: Op) -> None:
        inputs = tuple(map(self.save, op.inputs))
        outputs = tuple(self.value(value.name, value.type) for value in op.outputs)
        self._saved |= {old.name: new.name for old, new in zip(op.outputs, outputs, strict=True)}
        self.append(evolve(op, inputs=inputs, outputs=outputs, attrs=(*op.attrs, *self.when(op))))

    def when(self, op: Op) -> tuple[tuple[str, Attr], ...]:
        """The attribute of an op that is not recomputed in every layer."""
        return ()

    def get_saved(self, name: str) -> str:
        """How this body reads a saved forward value: outside of repeats all are visible."""
        return name

    def keep(self, stack: Value) -> None:
        """Takes note of a stack that a repeat of the forward body returns for this one."""

    # ---- the walk

    def differentiate_body(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """Writes the backward of `body`; returns `body` with repeats that keep what backward
        needs.
        """
        self._made_by, span = defs(body), self.span
        forward = [self._stmt(stmt) for stmt in reversed(body)]
        self.span, self.body = span, weights_beside(self.body)
        return tuple(reversed(forward))

    def add(self, name: str, part: str) -> None:
        """`part` is (a part of) the gradient of `name`."""
        self._parts.setdefault(name, []).append(part)

    def total(self, name: str) -> str | None:
        """The gradient of `name`, all parts added; None where nothing depends on it."""
        parts = self._parts.pop(name, [])
        if len(parts) > 1:
            return self.write("add", parts, gradient_name(name))
        return parts[0] if parts else None

    def total_or_zero(self, name: str) -> str:
        """The gradient of `name`, or zeros."""
        return self.total(name) or self.zeros(name)

    def zeros(self, name: str) -> str:
        """A zero gradient of `name`."""
        value = self.value(gradient_name(name), dual_type(self.type(name)))
        return self.append(Op("zeros", (), (value,), span=self.span))

    def _stmt(self, stmt: Stmt) -> Stmt:
        self.span = stmt.span
        if isinstance(stmt, Region):
            return self._repeat(stmt)
        if any(value.name in self._parts for value in stmt.outputs):
            grads = list[str]()
            for value in stmt.outputs:
                grads.append(self.total_or_zero(value.name) if value.type.differentiable else "")
            self._op(stmt, grads)
        return stmt

    def _op(self, op: Op, grads: list[str]) -> None:
        if op.kind == "coerce":
            step = Step(op.names("axes"), *conjugate(*ends(op)))
            self.add(op.inputs[0], self.coerce(grads[0], step, gradient_name(op.inputs[0])))
            return
        for name, grad in zip(op.inputs, gradients(OPS[op.kind], op, grads, self), strict=True):
            if grad:
                self.add(name, grad)

    def _repeat(self, region: Region) -> Region:
        if not any(result.name in self._parts for result in region.results):
            return region
        incoming = list[str]()
        for result in region.results:
            if result.type.differentiable:
                incoming.append(self.total_or_zero(result.name))
        inner = _RepeatBackward(self, region)
        forward = inner.write_region(incoming)
        self.body.append(inner.region)
        return forward


class _RepeatBackward(Backward):
    """The backward of a repeat's body, and the reversed repeat around it."""

    def __init__(self, outer: Backward, forward: Region) -> None:
        super().__init__(outer)
        self._outer, self._forward = outer, forward
        self._own = {arg.value.name for arg in forward.args}  # arguments of the forward body
        self._inside = set(self._own)  # all that it binds
        self._slices: list[Arg] = []  # what an iteration reads of what forward kept
        self._stacks: list[tuple[str, Value]] = []  # what forward is made to keep of each iteration
        self._is_recomputed = recomputes_region(outer.program, forward)
        self._ran = False
        self.region = forward

    def recomputes(self, op: Op) -> bool:
        return self._is_recomputed or super().recomputes(op)

    def when(self, op: Op) -> tuple[tuple[str, Attr], ...]:
        every = recomputes_layers(self.program, self._forward.dim)
        return (("every", every),) if self._is_recomputed and every > 1 else ()

    def _stmt(self, stmt: Stmt) -> Stmt:
        if self._is_recomputed and not self._ran and isinstance(stmt, Op) and self._keeps(stmt):
            self._ran = True
            self._run_until(stmt)
        return super()._stmt(stmt)

    def _run_until(self, op: Op) -> None:
        """Recomputes all ops before this one: when backward asks for one tensor, it asks for
        all of them.
        """
        for stmt in self._forward.body:
            if stmt is op:
                return
            if not isinstance(stmt, Op) or OPS[stmt.kind].decides:
                continue
            if stmt.outputs[0].name not in self._saved:
                self._recompute(stmt)

    def _keeps(self, op: Op) -> bool:
        """Whether an op has a gradient, for which autograd keeps a tensor that the iteration
        makes.
        """
        if not any(value.name in self._parts for value in op.outputs):
            return False
        types, wanted = tuple(map(self.type, op.inputs)), tuple(map(self.is_wanted, op.inputs))
        device = "cuda" if self.program.cluster.gpu else "cpu"
        saved = OPS[op.kind].get_saved_tensors(Local(self.program, op, types, wanted, device))
        # of a user's op nothing is known
        if saved.results or saved.others or op.kind == "call":
            return True
        return any(self._is_made(op.inputs[i]) for i in saved.operands)

    def _is_made(self, name: str) -> bool:
        """Whether an iteration makes a value, and not only another view of what enters it."""
        op = self._made_by.get(name)
        if op and OPS[op.kind].views(self.program, op):
            return self._is_made(op.inputs[0])
        return op is not None

    def get_saved(self, name: str) -> str:
        """A slice of a parameter or of a stack that forward returns; values from outside this
        body as outside.
        """
        if name not in self._inside | set(self._made_by):
            return self._outer.save(name)
        source = ""
        for arg in self._forward.args:
            if arg.enter is Enter.EACH and arg.value.name == name:
                source = arg.source
        source = source or self._stack(name)
        value = self.value(name, self.type(name))
        self._slices.append(Arg(value, self._outer.save(source), Enter.EACH))
        return value.name

    def keep(self, stack: Value) -> None:
        self._inside.add(stack.name)

    def _stack(self, name: str) -> str:
        value = self.value(name, self.type(name).stack_along(self._forward.dim))
        self._stacks.append((name, value))
        self._outer.keep(value)
        return value.name

    def write_region(self, incoming: list[str]) -> Region:
        """Writes `region` from the gradients of the forward repeat's results; returns the
        changed forward repeat.
        """
        forward = self._forward
        for repeat in regions_in(forward.body):
            self._inside |= {value.name for value in repeat.results}
        args = [Arg(self.value(grad, self.type(grad)), grad, Enter.CARRY) for grad in incoming]
        ends = [end for end in forward.yields if self.type(end.name).differentiable]
        for end, arg in zip(ends, args, strict=True):
            self.add(end.name, arg.value.name)
        body = self.differentiate_body(forward.body)
        yields_by_source = self._yields_of_carries()
        for name in list(self._parts):
            if name not in self._own:
                yields_by_source.append(self._yield_of_capture(name, args))
        yields_by_source += self._yields_of_slices()
        self._finish(args, yields_by_source)
        yields, results = [*forward.yields], [*forward.results]
        for name, stack in self._stacks:
            yields.append(Yield(name, Leave.STACK))
            results.append(stack)
        return evolve(forward, body=body, yields=tuple(yields), results=tuple(results))

    def _yields_of_carries(self) -> list[tuple[str, Yield]]:
        """Values that forward carries: the gradient that the last iteration leaves."""
        yields = list[tuple[str, Yield]]()
        for arg in self._forward.args:
            if arg.enter is Enter.CARRY and arg.value.type.differentiable:
                total = self.total_or_zero(arg.value.name)
                yields.append((arg.source, Yield(total, Leave.LAST)))
        return yields

    def _yield_of_capture(self, name: str, args: list[Arg]) -> tuple[str, Yield]:
        """A value from outside: its gradient is carried, and grows with each iteration."""
        so_far = self.value(gradient_name(name), dual_type(self.type(name)))
        args.append(Arg(so_far, self._outer.zeros(name), Enter.CARRY))
        self.add(name, so_far.name)
        return name, Yield(self.total_or_zero(name), Leave.LAST)

    def _yields_of_slices(self) -> list[tuple[str, Yield]]:
        """Parameters: the gradients of all iterations, stacked."""
        yields = list[tuple[str, Yield]]()
        for arg in self._forward.args:
            if arg.enter is Enter.EACH and (total := self.total(arg.value.name)):
                yields.append((arg.source, Yield(total, Leave.STACK)))
        return yields

    def _finish(self, args: list[Arg], yields_by_source: list[tuple[str, Yield]]) -> None:
        """Makes `region`, and hands the gradients that it returns to the outer body."""
        results: list[Value] = []
        for source, end in yields_by_source:
            type = self.type(end.name)
            if end.leave is Leave.STACK:
                type = type.stack_along(self._forward.dim)
            results.append(self.value(gradient_name(source), type))
            self._outer.add(source, results[-1].name)
        self.region = Region(
            "repeat",
            tuple(self.body),
            (*args, *self._slices),
            tuple(end for _, end in yields_by_source),
            tuple(results),
            self._forward.dim,
            reverse=True,
            span=self.span,
        )
