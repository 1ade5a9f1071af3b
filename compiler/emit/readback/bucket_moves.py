"""The flat parameters of each layer of a repeat, read off the IR: the functions that a loop's lines must call.

Purpose: they act on all buckets of a layer at once, in the order of the buckets; so the IR must do.  Backward does what
lines do in the opposite order of the lines.
Non-goals: the lines (`forward`), how each bucket is moved (the verifier), and what the step does (`step_buckets`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import evolve

from ...ir import Enter, Kind, Op, Program, Region, blocks
from ...ir.placements import ends
from ..loop_hooks import repeat_of

Repeats = tuple[tuple[str, str], ...]
"""The dims of repeats around a body, itself included, and their lines of the plan: the same in forward and backward."""


class LayerMoves:
    """One layer of a repeat of forward, which stands in `repeats`; slices of the parameters `entering` enter it.

    Of the buckets `own` it has a flat parameter, of those in `inner` one for each layer of the repeats in it.
    """

    def __init__(self, program: Program, region: Region, repeats: Repeats, entering: Collection[str]) -> None:
        self._program, self._region = program, region
        self._of = {bucket.dim: bucket.name for bucket in program.buckets}
        flat_params = {dim for arg in region.args if arg.enter is Enter.EACH for dim in arg.value.type.dims}
        taken = [b for b in program.buckets if b.dim in flat_params or {*entering} & {*b.params}]
        self.own = [bucket.name for bucket in taken if len(bucket.layers) == len(repeats)]
        self.inner = [bucket.name for bucket in taken if len(bucket.layers) > len(repeats)]
        self._forward, self._backward = _ops(region), self._backward_at(repeats) if self.own else []

    def functions(self) -> tuple[list[str], list[str]]:
        """Those that are called before a layer, and after it."""
        if not self.own:
            return [], []
        buckets = [self._program.bucket(name) for name in self.own]
        resharded = [bucket.name for bucket in buckets if bucket.reshard_after_forward]
        assert _complete(self._backward) == self.own, f"emit: {', '.join(self.own)} are reduced in another order"
        for ops in (self._forward, self._backward):
            gathers = self._gathers(ops)
            assert gathers == resharded[::-1], f"emit: {', '.join(gathers)} are not gathered in the order of buckets"
        is_gathered = any(bucket.shard_axes for bucket in buckets)
        return ["unshard" if is_gathered else "reduce_grads_in_backward"], ["reshard"] if resharded else []

    def groups(self, names: Collection[str], paths: Mapping[str, str]) -> list[str]:
        """The repeats whose layers have the buckets of these names; `paths` are parameters' name patterns."""
        firsts = (self._program.bucket(name).params[0] for name in names)
        return [*dict.fromkeys(repeat_of(paths[first]) for first in firsts)]

    def flat(self) -> list[Op]:
        """The ops that the moves do in forward."""
        return [op for op in self._forward if op.kind == "unpack" or self._moved(op)]

    def rest(self) -> Region:
        """The repeat without them."""
        flat = self.flat()
        return evolve(self._region, body=tuple(stmt for stmt in self._region.body if stmt not in flat))

    def _backward_at(self, around: Repeats) -> list[Op]:
        """The ops of the repeat of backward that undoes this one: where the gradients of its buckets are complete."""
        found = [ops for repeats, ops in _repeats(blocks(self._program)[2]) if repeats == around]
        found = [ops for ops in found if {*_complete(ops)} == {*self.own}]
        assert len(found) == 1, f"emit: backward has {len(found)} repeats that complete {', '.join(self.own)}"
        return found[0]

    def _moved(self, op: Op) -> str:
        """The bucket whose flat buffer an op leads from one placement to another; "" if it does not."""
        dims = op.outputs[0].type.dims if op.kind == "coerce" else ()
        return self._of.get("".join(dims[-1:]), "")

    def _gathers(self, ops: Sequence[Op]) -> list[str]:
        """The buckets that are gathered, in their order."""
        return [self._moved(op) for op in ops if self._moved(op) and ends(op)[0].kind is Kind.SHARDED]


def _complete(ops: Sequence[Op]) -> list[str]:
    """The buckets whose gradients are complete in a layer of backward, in their order."""
    return [str(op.get("bucket")) for op in ops if op.kind in ("begin", "pack")]


def _repeats(region: Region, around: Repeats = ()) -> Iterator[tuple[Repeats, list[Op]]]:
    """The repeats in a region: the dims and plan lines of those around each, itself included, and its own ops."""
    for inner in region.body:
        if isinstance(inner, Region):
            repeats = (*around, (inner.dim, str(inner.span)))
            yield repeats, _ops(inner)
            yield from _repeats(inner, repeats)


def _ops(region: Region) -> list[Op]:
    return [stmt for stmt in region.body if isinstance(stmt, Op)]
