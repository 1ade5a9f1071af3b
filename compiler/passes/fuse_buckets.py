"""Joins parameters whose gradients are reduced alike into one flat bucket per placement.

Purpose: per bucket one `pack` of gradients, one chain of coercions, one part of the norm, one `update`.  Where the plan
shares out optimizer state, gradients are scattered, each rank updates its part, and at the start of a step the parts
are gathered: the parameters' own chains become one of the bucket.
Before: `place_state`.  Non-goals: caps on the size of buckets, overlap with backward, scopes inside the step.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from attrs import evolve, field, frozen

from ..ir import (
    INVARIANT,
    PARTIAL,
    REPLICATED,
    Attr,
    Bucket,
    Dim,
    Kind,
    Names,
    Op,
    Program,
    Region,
    Type,
    Value,
    sharded,
    types,
)
from ..layout import layout
from ..ops import OPS
from ..placements import Step, ends


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


@frozen
class _Bucket:
    """A bucket to be: its parameters, in the order of the optimizer's groups, and the axes that share it out."""

    key: _Key
    params: tuple[str, ...]
    shards: tuple[str, ...]

    @property
    def dim(self) -> str:
        return f"flat_{self.key.name}"


@frozen
class _Lines:
    """Ops under construction, each typed as its entry infers."""

    frame: Program
    names: Names
    types: dict[str, Type]
    ops: list[Op] = field(factory=list[Op])

    def write(self, kind: str, inputs: Sequence[str], like: str, **attrs: Attr) -> Value:
        """Appends an op of one result, which is named after `like`."""
        return self.append(Op(kind, tuple(inputs), (), tuple(attrs.items()), span=self.frame.region.span), like)

    def coerce(self, value: Value, step: Step) -> Value:
        """Appends a coercion, unless it is over no axis."""
        if not step.axes:
            return value
        attrs: dict[str, Attr] = {"axes": step.axes, "from": step.source, "to": step.target}
        return self.write("coerce", [value.name], value.name, **attrs)

    def append(self, op: Op, like: str) -> Value:
        """Appends an op, its one result typed and named."""
        (type,) = OPS[op.kind].infer(self.frame, [self.types[name] for name in op.inputs], op)
        value = Value(self.names.fresh(like), type)
        self.types[value.name] = type
        self.ops.append(evolve(op, outputs=(value,)))
        return value


class _Fuser:
    def __init__(self, program: Program) -> None:
        self._program, self._step = program, program.region
        self._ops = [stmt for stmt in self._step.body if isinstance(stmt, Op)]
        self._made_by = {value.name: op for op in self._ops for value in op.outputs}
        self._updates = {op.inputs[3]: op for op in self._ops if op.kind == "update"}
        (inner,) = (stmt for stmt in self._step.body if isinstance(stmt, Region))
        self._inner, self._summed = inner, {value.name: value.type for value in inner.results}
        self._chains = {param: self._chain(op.inputs[0]) for param, op in self._updates.items()}
        self._buckets = self._grouped()

    def program(self) -> Program:
        dims = (*self._program.dims, *map(self._flat, self._buckets))
        frame = evolve(self._program, dims=dims)
        squares = {op.outputs[0].name: op for op in self._ops if op.kind == "sum_squares"}
        sums = {op.outputs[0].name for op in self._ops if op.kind == "coerce" and op.inputs[0] in squares}
        cut = {name for chain in self._chains.values() for name in chain[1:]} | squares.keys() | sums
        leaves = {bucket: self._leaves(bucket) for bucket in self._buckets if bucket.shards}
        cut |= {name for chains in leaves.values() for chain in chains for name in chain}
        known = {name: type for name, type in types(self._program).items() if name not in squares.keys() | sums}
        lines = _Lines(frame, Names(known), dict(known))
        gathers = [op for bucket, chains in leaves.items() for op in self._gathered(bucket, chains, lines)]
        final = {bucket: self._reduced(bucket, lines) for bucket in self._buckets}
        norm = self._norm(list(final.values()), lines)
        kept = [s for s in self._step.body if isinstance(s, Region) or not {v.name for v in s.outputs} & cut]
        kept = [s for s in kept if isinstance(s, Region) or s.kind != "update"]
        at = next(i for i, s in enumerate(kept) if isinstance(s, Op) and s.kind == "grad_norm")
        head, (total, *tail) = kept[:at], kept[at:]
        assert isinstance(total, Op), "fuse_buckets: no norm"
        updates = [self._update(bucket, final[bucket]) for bucket in self._buckets]
        body = (*gathers, *head, *lines.ops, evolve(total, inputs=norm), *tail, *updates)
        buckets = tuple(Bucket(b.key.name, b.params, final[b].type) for b in self._buckets)
        return evolve(frame, region=evolve(self._step, body=body), buckets=buckets)

    def _chain(self, name: str) -> list[str]:
        """The names from the microbatches' sum to the gradient that is updated with."""
        chain = [name]
        while op := self._made_by.get(chain[0]):
            chain.insert(0, op.inputs[0])
        return chain

    def _grouped(self) -> list[_Bucket]:
        groups: dict[_Key, list[str]] = {}
        for param, chain in self._chains.items():
            groups.setdefault(_key(self._summed[chain[0]]), []).append(param)
        shared = self._program.state.optimizer
        return [
            _Bucket(key, tuple(sorted(params, key=self._turn)), tuple(axis for axis in key.reduced if axis in shared))
            for key, params in groups.items()
        ]

    def _turn(self, param: str) -> int:
        """Parameters of one optimizer group lie side by side; those of none come first."""
        groups = self._program.train.optimizer.groups
        return next((i for i, g in enumerate(groups, 1) if any(fnmatchcase(param, p) for p in g.params)), 0)

    def _flat(self, bucket: _Bucket) -> Dim:
        degree = self._program.degree
        size = layout(self._program, bucket.params, degree(bucket.shards)).size * degree(bucket.key.sharded)
        return Dim(bucket.dim, size, span=self._step.span)

    # ---- parameters of shared buckets

    def _leaves(self, bucket: _Bucket) -> list[list[str]]:
        """For each parameter the names of its chain to its uses."""
        after = {op.inputs[0]: op for op in self._ops if op.kind in ("cast", "coerce")}
        chains: list[list[str]] = []
        for name in bucket.params:
            chains.append([])
            while op := after.get(name):
                name = op.outputs[0].name
                chains[-1].append(name)
        return chains

    def _gathered(self, bucket: _Bucket, chains: list[list[str]], lines: _Lines) -> list[Op]:
        """The ops from what the ranks hold of a bucket to its parameters as the model uses them."""
        begin = len(lines.ops)
        leaves = [self._made_by[chain[-1]].outputs[0] for chain in chains]
        own, used = sharded(bucket.dim), leaves[0].type
        value = lines.write("pack", bucket.params, f"w_{bucket.key.name}", dim=bucket.dim)
        value = lines.coerce(value, Step(bucket.shards, INVARIANT, own))
        if used.dtype != value.type.dtype:
            value = lines.write("cast", [value.name], value.name, dtype=used.dtype)
        value = lines.coerce(value, Step(bucket.shards, own, REPLICATED))
        others = tuple(a for a in used.axes_in(Kind.REPLICATED) if a not in bucket.shards)
        value = lines.coerce(value, Step(others, INVARIANT, REPLICATED))
        attrs = (("bucket", bucket.key.name),)
        ops = [*lines.ops[begin:], Op("unpack", (value.name,), tuple(leaves), attrs, span=self._step.span)]
        del lines.ops[begin:]
        return ops

    # ---- gradients

    def _reduced(self, bucket: _Bucket, lines: _Lines) -> Value:
        """Writes the ops that pack and reduce a bucket; its gradient of record."""
        chains = [self._chains[param] for param in bucket.params]
        value = lines.write("pack", [chain[0] for chain in chains], f"g_{bucket.key.name}", dim=bucket.dim)
        if bucket.shards:
            value = lines.coerce(value, Step(bucket.shards, PARTIAL, sharded(bucket.dim)))
            rest = tuple(axis for axis in bucket.key.reduced if axis not in bucket.shards)
            return lines.coerce(value, Step(rest, PARTIAL, INVARIANT))
        for name in chains[0][1:]:
            made = self._made_by[name]
            value = lines.coerce(value, Step(made.names("axes"), *ends(made)))
        return value

    def _norm(self, final: list[Value], lines: _Lines) -> tuple[str, ...]:
        """Writes the sums of squares, added over the axes on which gradients are sharded; returns them."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for value in final:
            groups.setdefault(value.type.axes_in(Kind.SHARDED), []).append(value.name)
        parts: list[str] = []
        for axes, names in groups.items():
            squares = lines.write("sum_squares", names, "squares")
            parts.append(lines.coerce(squares, Step(axes, PARTIAL, INVARIANT)).name)
        return tuple(parts)

    def _update(self, bucket: _Bucket, final: Value) -> Op:
        """One update of all parameters of a bucket."""
        first = self._updates[bucket.params[0]]
        outputs = tuple(self._updates[param].outputs[0] for param in bucket.params)
        inputs = (final.name, *first.inputs[1:3], *bucket.params)
        return Op("update", inputs, outputs, (("bucket", bucket.key.name),), span=first.span)


def _key(type: Type) -> _Key:
    return _Key(type.axes_in(Kind.PARTIAL), type.axes_in(Kind.SHARDED), type.dtype)
