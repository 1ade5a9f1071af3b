"""Joins the reductions of parameter gradients into one flat bucket per placement.

Purpose: per bucket one `pack`, one chain of coercions, one `sum_squares` part, one `update`.
Before: `place_state`.  Non-goals: caps on the size of buckets and overlap with backward.
"""

from attrs import evolve, frozen

from ..ir import Bucket, Dim, Kind, Names, Op, Program, Region, Stmt, Type, Value, types
from ..ops import OPS


def fuse_buckets(program: Program) -> Program:
    """The program with buckets."""
    return _Fuser(program).program()


@frozen
class _Key:
    """What gradients of one bucket share: the axes they are reduced over, and those they are sharded over."""

    reduced: tuple[str, ...]
    sharded: tuple[str, ...]
    dtype: str

    @property
    def name(self) -> str:
        return "_".join([*(self.reduced or ("local",)), *(("split", *self.sharded) if self.sharded else ())])


class _Fuser:
    def __init__(self, program: Program) -> None:
        self._program, self._step = program, program.region
        self._names = Names(types(program))
        self._ops = [stmt for stmt in self._step.body if isinstance(stmt, Op)]
        self._made_by = {value.name: op for op in self._ops for value in op.outputs}
        self._updates = [op for op in self._ops if op.kind == "update"]
        self._dims: list[Dim] = []

    def program(self) -> Program:
        (inner,) = (stmt for stmt in self._step.body if isinstance(stmt, Region))
        summed = {value.name: value.type for value in inner.results}
        chains = {op.inputs[3]: self._chain(op.inputs[0]) for op in self._updates}
        groups: dict[_Key, list[str]] = {}
        for param, chain in chains.items():
            groups.setdefault(_key(summed[chain[0]]), []).append(param)
        cut = {name for chain in chains.values() for name in chain[1:]}
        body: list[Stmt] = [
            s for s in self._step.body if isinstance(s, Region) or (s.outputs[0].name not in cut and s.kind != "update")
        ]
        at = body.index(next(s for s in body if isinstance(s, Op) and s.kind == "sum_squares"))
        buckets, reductions, final = self._reductions(groups, chains, summed)
        where = {chains[param][-1]: final[bucket.name] for bucket in buckets for param in bucket.params}
        tail = [self._over_buckets(s, where) if isinstance(s, Op) and s.kind == "sum_squares" else s for s in body[at:]]
        updates = [self._update(bucket, final) for bucket in buckets]
        region = evolve(self._step, body=(*body[:at], *reductions, *tail, *updates))
        return evolve(self._program, region=region, buckets=buckets, dims=(*self._program.dims, *self._dims))

    def _chain(self, name: str) -> list[str]:
        """The names from the microbatches' sum to the gradient that is updated with."""
        chain = [name]
        while op := self._made_by.get(chain[0]):
            chain.insert(0, op.inputs[0])
        return chain

    def _reductions(
        self, groups: dict[_Key, list[str]], chains: dict[str, list[str]], summed: dict[str, Type]
    ) -> tuple[tuple[Bucket, ...], list[Op], dict[str, str]]:
        """The buckets, the ops that pack and reduce them, and the final gradient of each bucket."""
        buckets: list[Bucket] = []
        ops: list[Op] = []
        final: dict[str, str] = {}
        for key, params in groups.items():
            inputs = tuple(chains[param][0] for param in params)
            dim = f"flat_{key.name}"
            self._dims.append(Dim(dim, self._flat_size(key, [summed[name] for name in inputs]), span=self._step.span))
            frame = evolve(self._program, dims=(*self._program.dims, *self._dims))
            pack = Op("pack", inputs, (), (("dim", dim),), span=self._step.span)
            (type,) = OPS["pack"].infer(frame, [summed[name] for name in inputs], pack)
            ops.append(evolve(pack, outputs=(Value(self._names.fresh(f"g_{key.name}"), type),)))
            for name in chains[params[0]][1:]:
                ops.append(self._onto_bucket(self._made_by[name], ops[-1].outputs[0], frame))
            final[key.name] = ops[-1].outputs[0].name
            buckets.append(Bucket(key.name, tuple(params), ops[-1].outputs[0].type))
        return tuple(buckets), ops, final

    def _flat_size(self, key: _Key, types: list[Type]) -> int:
        return sum(self._program.elements(type) for type in types) * self._program.degree(key.sharded)

    def _onto_bucket(self, op: Op, flat: Value, frame: Program) -> Op:
        """The coercion `op` of one gradient, done to the bucket."""
        op = evolve(op, inputs=(flat.name,), span=self._step.span)
        (type,) = OPS[op.kind].infer(frame, [flat.type], op)
        return evolve(op, outputs=(Value(self._names.fresh(flat.name), type),))

    def _over_buckets(self, op: Op, where: dict[str, str]) -> Op:
        """`sum_squares` of the buckets that hold the gradients it summed."""
        return evolve(op, inputs=tuple(dict.fromkeys(where[name] for name in op.inputs)))

    def _update(self, bucket: Bucket, final: dict[str, str]) -> Op:
        """One update of all parameters of a bucket."""
        of = {op.inputs[3]: op for op in self._updates}
        first = of[bucket.params[0]]
        outputs = tuple(of[param].outputs[0] for param in bucket.params)
        return Op(
            "update",
            (final[bucket.name], *first.inputs[1:3], *bucket.params),
            outputs,
            (("bucket", bucket.name),),
            span=first.span,
        )


def _key(type: Type) -> _Key:
    return _Key(type.axes_in(Kind.PARTIAL), type.axes_in(Kind.SHARDED), type.dtype)
