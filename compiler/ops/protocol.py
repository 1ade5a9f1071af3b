"""The op protocol: the declarations of every op, and the typing rule that follows from them.

Purpose: one entry per op, which placement, differentiation, checks, accounts and emission read.
Non-goals: the entries themselves (one module per family beside this one).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from attrs import Factory, frozen

from ..ir import INVARIANT, PARTIAL, REPLICATED, Attr, Kind, Op, Placement, Program, Type, sharded
from .call import CallOf, with_attributes
from .line import LineOf
from .messages import Communicates
from .reach import ReachOf
from .roles import RolesOf
from .saved_tensors import Bytes, Local, Saved, Saves, Views, results
from .work import WorkOf, memory_work


class TypingError(Exception):
    """Operands that an op cannot take: dims that do not fit, or placements without a rule."""


class Builder(Protocol):
    """The builder with which an adjoint writes its ops."""

    def emit(
        self, kind: str, inputs: Sequence[str], like: Sequence[str], **attrs: Attr
    ) -> tuple[str, ...]:
        """Appends an op whose results are named after the gradients of `like`; returns the
        results.
        """
        ...

    def save(self, name: str) -> str:
        """The forward value `name`, saved for backward."""
        ...

    def type(self, name: str) -> Type:
        """The type of a forward value."""
        ...

    def is_wanted(self, name: str) -> bool:
        """Whether anything needs the gradient of the forward value `name`."""
        ...

    def maker(self, name: str) -> Op:
        """The op of the same body that makes the forward value `name`."""
        ...


Shape = tuple[str, tuple[str, ...]]
"""Element type and dims of a result, before placement."""

Shapes = Callable[[Sequence[Type], Op], Sequence[Shape]]
Typing = Callable[[Program, Sequence[Type], Op], Sequence[Type]]
Adjoint = Callable[[Op, Sequence[str], Builder], Sequence[str | None]]
Expand = Callable[[Op, Callable[[str], str], Callable[[str], Type]], list[Op]]

RUNTIME = "scalec.runtime"
KERNELS = "scalec.runtime.kernels"
TORCH = "torch"
FUNCTIONAL = "torch.nn.functional"
"""Modules that emitted programs import functions from."""

ALL = -1
"""In `OpDef.linear`: every operand of an op of any number of operands."""


@frozen
class Operand:
    """An operand as a plan writes it: numbers, or the input named by `given`.

    `init` is how a parameter first used here begins, "" for the model's `init`.  `optional`
    operands come after the others; an op without one has fewer operands.  No plan writes an
    `implied` operand: the compiler gives it.
    """

    name: str
    input_name: str = ""
    init: str = ""
    optional: bool = False
    implied: bool = False


@frozen
class Vjp:
    """How ops `vjp` make the gradients of an op's operands, from the gradients of its results and
    from what else they read.

    wrt           the operands that have gradients, () for all that are numbers
    unread        the operands among them that it does not read: their shapes follow from their
                  gradients
    result        whether it reads the first result
    workspace     bytes that the gradients of inputs hold on their way, beside operands and results
    from_forward  the operands whose gradients forward makes and saves, and backward only scales
                  where they lie: by the operand's name, the name of the saved tensor
    delayed       whether the runtime may put off the gradients of weights
    communicates  the messages that make the gradients of inputs; these are the outputs of the op
                  that it is given
    work          the work of making them; its op has them as outputs
    """

    wrt: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    result: bool = False
    workspace: Bytes = lambda local: 0
    from_forward: Mapping[str, str] = Factory(dict[str, str])
    delayed: bool = False
    communicates: Communicates | None = None
    work: WorkOf = memory_work


Range = tuple[Callable[[float], bool], str]
"""A condition on a number, and its text."""


@frozen
class Attribute:
    """A constant argument: a number, one of `choices`, dims, or, where no plan writes it, of the
    Python types `kinds`.

    One that has its `default` is left out of the IR.  It may name `dims`: "own" are one or several
    of the first operand's, "last" the same but its last one where a plan names none, "any" is one
    dim of the model, "several" are two or more.  A number is in its `range`; a `share` is from 0
    and below 1.  No plan writes one that is `implied`: the compiler gives it.
    """

    name: str
    choices: tuple[str, ...] = ()
    default: float | str | tuple[()] | None = None
    kinds: tuple[type, ...] = (int, float)
    dims: Literal["", "own", "last", "any", "several"] = ""
    share: bool = False
    implied: bool = False
    range: Range | None = None

    @property
    def types(self) -> tuple[type, ...]:
        """The Python types of its value."""
        if self.dims == "any":
            return (str,)
        if self.dims:
            return (tuple,)
        if self.choices:
            return (str,)
        return self.kinds


DETERMINISTIC = Attribute("deterministic", choices=("off", "on"), default="off", implied=True)
"""Whether an op's kernels give the same bits each time on a GPU, forward and backward."""


ASYNC = Attribute("async_op", choices=("off", "on"), default="off", implied=True)
"""Whether an op only begins what it sends, as torch's collectives do."""


def begins(op: Op) -> bool:
    """Whether an op only begins what it sends: an op that `awaits` it reads its result, and no
    other.
    """
    return dict(op.attrs).get(ASYNC.name) == "on"


def takes(*names: str) -> tuple[Operand, ...]:
    """Operands of an op that no plan writes."""
    return tuple(map(Operand, names))


Dims = Callable[[Sequence[Type], Op], frozenset[str]]
Permutes = Callable[[Op, int], Sequence[int]]
Joins = Callable[[Sequence[Type], Op], Mapping[str, tuple[str, ...]]]
Unsharded = Callable[[Sequence[Type], Op], Mapping[int, frozenset[str]]]
Allows = Callable[[Sequence[Type], Op, Sequence[Placement]], bool]


def always(local: Local) -> bool:
    """True of any operands."""
    return True


def never(program: Program, op: Op) -> bool:
    """False of any op."""
    return False


def wide(dtype: str) -> str:
    """The element type of sums: f64 for f64, else f32."""
    return "f64" if dtype == "f64" else "f32"


def total(types: Sequence[Type], op: Op) -> list[Shape]:
    """A number, in the element type of sums."""
    return [(wide(types[0].dtype), ())]


def last_dim(types: Sequence[Type], op: Op) -> frozenset[str]:
    """The last dim of the first operand."""
    return frozenset(types[0].dims[-1:])


def one_dim(types: Sequence[Type], op: Op, places: Sequence[Placement]) -> bool:
    """Whether the operands are sharded by one dim only."""
    return len({place.dim for place in places} - {""}) == 1


@frozen
class OpDef:
    """One op.

    shapes          element types and dims of the results, from the operands'
    variadic        whether any number of further operands may follow
    linear          groups of operands; in each the op is jointly linear (they may be partial)
    roles           dims that mean something to the op, by what they mean
    unsharded_dims  dims that no axis may shard
    as_placed       operands that it takes as they are placed; by the generic rule, invariant and
                    without a gradient
    whole_operands  operands that an axis leaves whole along some dims where it shards these dims of
                    the others
    permutes        for an op that moves the positions along its dim `over`: where each position
                    comes from
    reach           which positions of an operand a position of the result depends on; by default
                    its own alone, or, of an operand whose positions no axis may shard or the result
                    lacks, all
    joins           dims that others make up, concatenated: their sizes are the sums of these
    allows          whether operands that one axis shards so make sense together
    contracts       the placement of a result that lacks the dim that was sharded
    typing          replaces the generic typing rule
    vjp             how ops `vjp` make the gradients of the operands
    adjoint         writes the same gradients with ops of other kinds too
    expand          rewrites an op whose `unsharded_dims` are sharded into ops that show their
                    collectives
    function        the function in emitted programs; "" where Python has an operator for it
    torch           the function in programs of torch alone, by default the same: of `torch_ops`, or
                    a dotted name
    call            what the call of that function says besides the operands, by default the
                    attributes
    line            how the training step writes it, if it is an op of the step
    module          the module that emitted programs import the function from
    stem            the name of a result that has none in the plan, "" for the op's own
    saves           what autograd keeps for backward, where that is not what the `vjp` reads
    workspace       bytes that the function needs while it runs, beside operands, results and saved
                    tensors
    views           whether the results lie in the first operand's memory, by default in their own
    holds           bytes of the result on one rank, where it is no tensor of its type
    communicates    the messages that each rank sends, in order
    awaits          whether it waits for what another op began, which its own gradient begins
    copies_sent     whether an op that only begins sends a copy of its first operand; else the
                    operand stays in memory until another op has awaited it
    copies_received whether an op that awaits it copies what has come; else what has come is the
                    result
    waits_on_host   whether the host waits at it for the GPU's counts, by which it sizes what
                    follows
    may_delay       whether it makes gradients of weights, for which nothing but the update waits: a
                    pipeline's schedule may put them off
    late_weights    whether these gradients may run beside what the gradients of its inputs send
    work            what a rank computes, by default its operands read and its results written
    decides         whether its results are decisions, or come of one: backward reads and never
                    recomputes them
    decision        the part of a decision that is kept where the layer is recomputed
    deterministic   whether its function and its gradients have the same bits each time on a GPU,
                    without being told to by the attribute DETERMINISTIC
    user_visible    whether a plan may call it by its name
    plan_name       the name that a plan calls it by, where that is not its own
    """

    name: str
    doc: str
    shapes: Shapes | None = None
    operands: tuple[Operand, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    variadic: bool = False
    linear: tuple[tuple[int, ...], ...] = ()
    roles: RolesOf | None = None
    unsharded_dims: Dims = lambda types, op: frozenset()
    as_placed: tuple[int, ...] = ()
    whole_operands: Unsharded = lambda types, op: {}
    permutes: Permutes | None = None
    reach: ReachOf = lambda types, op: {}
    joins: Joins = lambda types, op: {}
    allows: Allows = one_dim
    contracts: Placement = PARTIAL
    typing: Typing | None = None
    vjp: Vjp | None = None
    adjoint: Adjoint | None = None
    expand: Expand | None = None
    function: str = ""
    torch: str = ""
    call: CallOf = with_attributes
    line: LineOf | None = None
    module: str = RUNTIME
    stem: str = ""
    saves: Saves | None = None
    workspace: Bytes = lambda local: 0
    views: Views = lambda program, op: False
    holds: Callable[[Program, Op], int] | None = None
    communicates: Communicates | None = None
    awaits: bool = False
    copies_sent: Views = never
    copies_received: Views = never
    waits_on_host: Views = never
    may_delay: Callable[[Op], bool] = lambda op: False
    late_weights: bool = False
    work: WorkOf = memory_work
    decides: bool = False
    decision: Saves = results
    deterministic: Callable[[Local], bool] = always
    user_visible: bool = False
    plan_name: str = Factory(lambda self: self.name, takes_self=True)

    def infer(self, program: Program, types: Sequence[Type], op: Op) -> tuple[Type, ...]:
        """The types of the results.  Raises TypingError where no rule allows the operands."""
        if not self.fits(len(types)):
            raise TypingError(f"{self.name} takes {len(self.operands)} operands, not {len(types)}")
        if self.typing:
            return tuple(self.typing(program, types, op))
        assert self.shapes, f"op {self.name} declares neither shapes nor typing"
        shapes = tuple(self.shapes(types, op))
        for dim, parts in self.joins(types, op).items():
            _require_sum(program, dim, parts)
        placements: list[dict[str, Placement]] = [{} for _ in shapes]
        axes_in_use: set[str] = set()
        for type in types:
            axes_in_use.update(axis for axis, _ in type.places)
        for axis in program.axes:
            if axis.name not in axes_in_use:
                continue  # results are invariant on it, as all operands are
            for result, place in zip(
                placements, self._on_axis(axis.name, types, shapes, op), strict=True
            ):
                result[axis.name] = place
        results: list[Type] = []
        for (dtype, dims), places in zip(shapes, placements, strict=True):
            results.append(Type(dtype, dims, program.places(places)))
        return tuple(results)

    def get(self, op: Op, name: str) -> Attr:
        """The attribute `name` of an op, given or by default."""
        attrs = dict(op.attrs)
        if name in attrs:
            return attrs[name]
        default = next(attribute.default for attribute in self.attributes if attribute.name == name)
        assert default is not None, f"{op.kind} lacks {name}"
        return default

    @property
    def differentiable(self) -> bool:
        """Whether its operands have gradients."""
        return bool(self.vjp or self.adjoint)

    @property
    def sends(self) -> bool:
        """Whether it communicates, forward or backward: then all ranks do it in one order."""
        return bool(self.communicates or self.awaits or (self.vjp and self.vjp.communicates))

    def get_saved_tensors(self, local: Local) -> Saved:
        """The tensors that autograd saves: the ones that gradients are computed from, unless the op
        says otherwise.
        """
        if self.saves:
            return self.saves(local)
        if not self.vjp:
            return Saved()
        read = tuple(i for i in range(len(local.types)) if i not in self.vjp.unread)
        return Saved(operands=read, results=(0,) if self.vjp.result else ())

    def fits(self, count: int) -> bool:
        """Whether the op takes this number of operands."""
        least = sum(not operand.optional for operand in self.operands)
        return least <= count and (self.variadic or count <= len(self.operands))

    def _on_axis(
        self, axis: str, types: Sequence[Type], shapes: Sequence[Shape], op: Op
    ) -> list[Placement]:
        """The rule of one mesh axis: all invariant, or linear in what is partial, or sharded
        alike, or replicated.
        """
        places = [type.placement_on(axis) for type in types]
        split = {place.dim for place in places} - {""}
        self._require(
            all(places[i] == INVARIANT for i in self.as_placed if i < len(types)),
            axis,
            types,
            "shares state",
        )
        if not split and all(
            type.placement_on(axis) == INVARIANT for type in types if type.dtype != "i64"
        ):
            return [INVARIANT] * len(shapes)
        partial = tuple(i for i, place in enumerate(places) if place == PARTIAL)
        if partial:
            self._require_linear(partial, axis, types)
            return [PARTIAL] * len(shapes)
        self._require_alike(split, axis, types, op)
        if not split:
            return [REPLICATED] * len(shapes)
        self._require(self.allows(types, op, places), axis, types, "has no rule for operands")
        self._require(
            not split & self.unsharded_dims(types, op), axis, types, "needs that dim whole"
        )
        return [self._sharded_result(dims, split) for _, dims in shapes]

    def _require_linear(self, partial: tuple[int, ...], axis: str, types: Sequence[Type]) -> None:
        """The op is linear in the operands `partial`, and all others are replicated on the axis."""
        self._require(
            partial in self._groups(len(types)), axis, types, "is not linear in what is partial"
        )
        others = [type for i, type in enumerate(types) if i not in partial]
        self._require(
            all(type.placement_on(axis) in _placements_as_replicated(type) for type in others),
            axis,
            types,
            "mixes partial and not",
        )

    def _require_alike(self, split: set[str], axis: str, types: Sequence[Type], op: Op) -> None:
        """The axis shards every operand by one of the dims `split`, if it has such a dim."""
        whole = self.whole_operands(types, op)
        for i, type in enumerate(types):
            if i in self.as_placed:
                continue
            split_here = split - whole.get(i, frozenset())
            allowed = [sharded(dim) for dim in type.dims if dim in split_here]
            if not allowed:
                allowed = _placements_as_replicated(type)
            self._require(
                type.placement_on(axis) in allowed, axis, types, "needs its operands sharded alike"
            )

    def _sharded_result(self, dims: Sequence[str], split: set[str]) -> Placement:
        """The placement of a result on an axis that shards operands by the dims `split`."""
        for dim in dims:
            if dim in split:
                return sharded(dim)
        return self.contracts

    def is_linear(self, count: int) -> bool:
        """Whether the op is jointly linear in all of its operands, if there are `count`."""
        return (*range(count),) in self._groups(count)

    def _groups(self, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(count)) if ALL in group else group for group in self.linear)

    def _require(self, holds: bool, axis: str, types: Sequence[Type], what: str) -> None:
        if not holds:
            places = ", ".join(str(type.placement_on(axis)) for type in types)
            raise TypingError(f"{self.name} {what} on {axis}; its operands are {places}")


def _require_sum(program: Program, dim: str, parts: tuple[str, ...]) -> None:
    """A dim is as large as its parts together."""
    sizes = [program.size(part) for part in parts]
    if sum(sizes) != program.size(dim):
        words = " + ".join(f"{part} {size}" for part, size in zip(parts, sizes, strict=True))
        raise TypingError(f"{dim} is {program.size(dim)}, but {words} = {sum(sizes)}")


def _placements_as_replicated(type: Type) -> list[Placement]:
    """The placements that count as replicated: where there is no gradient, an invariant value
    does too.
    """
    return [REPLICATED, INVARIANT] if type.dtype == "i64" else [REPLICATED]


def is_pending(type: Type) -> bool:
    """Whether a sum over ranks is still to be done."""
    return bool(type.axes_in(Kind.PARTIAL))
