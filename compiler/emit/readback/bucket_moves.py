"""What each turn of a repeat does with its flat buffers, read off the IR: the moves that a loop's lines must do.

Purpose: a list of them.  What lines do in backward comes in the opposite order of the lines.
Non-goals: the lines (`moves`), and what the step does with buckets (`state`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import evolve, frozen

from ...ir import Enter, Kind, Op, Program, Region
from ...ir.placements import ends
from .classes import Place
from .values import blocks

Over = tuple[str, ...]


@frozen
class Move:
    """A line of a loop: the function, the bucket of which it is given a turn's buffer, axes, keywords in order."""

    function: str
    bucket: str
    axes: tuple[Over, ...] = ()
    keywords: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        words = [self.bucket, *map(str, self.axes), *(f"{key}={value}" for key, value in self.keywords)]
        return f"{self.function}({', '.join(words)})"


@frozen
class Moves:
    """Those before the call of a turn's module, and those after it."""

    before: tuple[Move, ...] = ()
    after: tuple[Move, ...] = ()


class Turn:
    """One turn of a repeat of forward, which stands at `place`; slices of the parameters `entering` enter it.

    Of the buckets `own` it has a buffer, of those in `inner` one for each turn of the repeats in it.
    """

    def __init__(self, program: Program, region: Region, place: Place, entering: Collection[str]) -> None:
        self._program, self._region = program, region
        self._of = {bucket.dim: bucket.name for bucket in program.buckets}
        flat_params = {dim for arg in region.args if arg.enter is Enter.EACH for dim in arg.value.type.dims}
        taken = [b for b in program.buckets if b.dim in flat_params or {*entering} & {*b.params}]
        self.own = [bucket.name for bucket in taken if len(bucket.turns) == len(place.repeats)]
        self.inner = [bucket.name for bucket in taken if len(bucket.turns) > len(place.repeats)]
        self._step = _ops(program.region)
        self._forward, self._backward = _ops(region), self._backward_at(place) if self.own else []

    def moves(self) -> Moves:
        """In the order of the lines."""
        reductions = [self._reduction(name) for name in _complete(self._backward)]
        gathers, again = self._gathers(self._forward), self._gathers(self._backward)
        weights = [*self._weights(gathers)]
        inside = [move.bucket for move in weights if move.function == "unshard"]
        assert inside == [*gathers], f"emit: {', '.join(gathers)} are not gathered in the order of the buckets"
        freed = [Move("reshard", name, (axes,)) for name, axes in reversed(again.items())]
        return Moves((*reversed(reductions), *weights), tuple(freed))

    def flat(self) -> list[Op]:
        """The ops that the moves do in forward."""
        return [op for op in self._forward if op.kind == "unpack" or self._moved(op)]

    def rest(self) -> Region:
        """The repeat without them."""
        flat = self.flat()
        return evolve(self._region, body=tuple(stmt for stmt in self._region.body if stmt not in flat))

    def weights(self) -> dict[str, str]:
        """The values that they make of parameters, and whose they are."""
        made = ((op, self._program.bucket(str(op.get("bucket"))).params) for op in self.flat() if op.kind == "unpack")
        return {value.name: param for op, params in made for value, param in zip(op.outputs, params, strict=True)}

    def _backward_at(self, place: Place) -> list[Op]:
        """The ops of the repeat of backward that undoes this one: where the gradients of its buckets are complete."""
        found = [ops for repeats, ops in _repeats(blocks(self._program)[2]) if repeats == place.repeats]
        found = [ops for ops in found if {*_complete(ops)} == {*self.own}]
        assert len(found) == 1, f"emit: backward has {len(found)} repeats that complete {', '.join(self.own)}"
        return found[0]

    def _moved(self, op: Op) -> str:
        """The bucket whose flat buffer an op leads from one placement to another; "" if it does not."""
        dims = op.outputs[0].type.dims if op.kind == "coerce" else ()
        return self._of.get("".join(dims[-1:]), "")

    def _reduction(self, name: str) -> Move:
        """What is begun at the end of a turn's backward: that of the turn itself, or its part of the step's."""
        each = any(op.kind == "pack" and op.get("bucket") == name for op in self._backward)
        ops = self._backward if each else self._step
        sums = [op for op in ops if self._moved(op) == name and ends(op)[0].kind is Kind.PARTIAL]
        over = [(ends(op)[1].kind, op.names("axes")) for op in sums]
        words: dict[str, object] = {"scatter" if kind is Kind.SHARDED else "add": axes for kind, axes in over}
        assert len(words) == len(over), f"emit: {name} is reduced more than once"
        words |= {"each": True} if each else {}
        words |= {"dtype": sent} if (sent := self._sent(name, ops, sums)) else {}
        return Move("reduce_grads_in_backward", name, (), tuple(sorted(words.items())))

    def _sent(self, name: str, ops: Sequence[Op], sums: Sequence[Op]) -> str:
        """The element type in which a gradient is reduced, each time cast to it and back; "" where it is of record."""
        record = self._program.bucket(name).type.dtype
        found = {op.outputs[0].type.dtype for op in sums}
        assert len(found) == 1, f"emit: {name} is reduced in {', '.join(sorted(found)) or 'no element type'}"
        (sent,) = found
        if sent == record:
            return ""
        casts = [op for op in ops if op.kind == "cast"]
        made = {op.outputs[0].name for op in casts}
        kept = {op.inputs[0] for op in casts if op.get("dtype") == record}
        between = all(op.inputs[0] in made and op.outputs[0].name in kept for op in sums)
        assert between, f"emit: {name} is reduced in {sent} without casts to it and back"
        return sent

    def _gathers(self, ops: Sequence[Op]) -> dict[str, Over]:
        """The buckets that are gathered, in their order, and the axes."""
        sharded = (op for op in ops if self._moved(op) and ends(op)[0].kind is Kind.SHARDED)
        return {self._moved(op): op.names("axes") for op in sharded}

    def _weights(self, gathers: Mapping[str, Over]) -> Iterator[Move]:
        """How a turn comes by its parameters: it gathers them, waits for what the step began to gather, or has them."""
        for bucket in reversed(self._program.buckets):
            if bucket.name in gathers:
                yield Move("unshard", bucket.name, (gathers[bucket.name],))
            elif bucket.name in self.own and bucket.name in self._gathers(self._step):
                yield Move("wait_for_unshard", bucket.name)


def _complete(ops: Sequence[Op]) -> list[str]:
    """The buckets whose gradients are complete in a turn of backward, in their order."""
    return [str(op.get("bucket")) for op in ops if op.kind in ("begin", "pack")]


def _repeats(region: Region, around: Sequence[tuple[str, str]] = ()) -> Iterator[tuple[object, list[Op]]]:
    """The repeats in a region: the dims and plan lines of those around each, itself included, and its own ops."""
    for inner in region.body:
        if isinstance(inner, Region):
            repeats = (*around, (inner.dim, str(inner.span)))
            yield repeats, _ops(inner)
            yield from _repeats(inner, repeats)


def _ops(region: Region) -> list[Op]:
    return [stmt for stmt in region.body if isinstance(stmt, Op)]
