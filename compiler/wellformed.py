"""Says which programs are legal: run before the first pass and after each.

Purpose: declarations that agree with each other; every name bound once and before its use, every op typed as its entry
infers, every region's ends matched.
Non-goals: the user's mistakes (`passes.validate`); whatever fails here is a defect of the pass that is named, or of IR
text edited by hand.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from attrs import evolve

from .begun import misbegun
from .ir import (
    FLOATS,
    INVARIANT,
    ITEM_BYTES,
    MICROBATCHES,
    PARTIAL,
    Arg,
    Attr,
    Bucket,
    Enter,
    Kind,
    Leave,
    Op,
    Param,
    Placement,
    Program,
    Region,
    Type,
    Value,
    Yield,
)
from .layout import layout_of
from .leaves import products
from .limits import MAX_DEPTH
from .ops import OPS, TypingError
from .placements import COERCIONS, ends


def check(program: Program) -> None:
    """Asserts that `program` is legal; a failure names the pass that made it."""
    _Declarations(program).check()
    _Scope(program).outermost()


FIRST = "resolve"
"""After this stage a claim may still stand twice: `validate` tells the user."""

STEP_STAGES = ("differentiate", "place_state", "fuse_buckets", "schedule_pipeline")
"""After these passes the program is a training step, before them a model."""

WORK_STAGES = ("propagate", "choose_layout")
"""After these passes every op but leaves says what it works on."""

INITS = {"normal": 1, "ones": 0, "zeros": 0}
"""Initial values, and how many numbers each takes."""


class _Checker:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._sizes = {dim.name: dim.size for dim in program.dims}
        self._axes = {axis.name: place for place, axis in enumerate(program.axes)}

    def _at(self, what: str) -> str:
        return f"{self._program.stage}: {what}"

    def _type(self, name: str, type: Type) -> None:
        """Dims and axes are declared, placements canonical, and what is sharded divides."""
        assert type.dtype in ITEM_BYTES, self._at(f"{name}: there is no element type {type.dtype}")
        assert all(dim in self._sizes for dim in type.dims), self._at(f"{name}: has a dim that is not declared")
        assert len({*type.dims}) == len(type.dims), self._at(f"{name}: has a dim twice")
        if not type.places:
            return
        assert all(axis in self._axes for axis, _ in type.places), self._at(f"{name}: lies over an unknown axis")
        order = [self._axes[axis] for axis, _ in type.places]
        assert order == sorted({*order}), self._at(f"{name}: its axes are not in mesh order, each once")
        for _, place in type.places:
            self._place(name, place, type)
        for dim in {place.dim for _, place in type.places} - {""}:
            ranks = self._program.degree(type.axes_of(dim))
            assert self._sizes[dim] % ranks == 0, self._at(f"{name}: {dim} = {self._sizes[dim]} over {ranks} ranks")

    def _place(self, name: str, place: Placement, type: Type) -> None:
        assert place != INVARIANT, self._at(f"{name}: says that it is invariant, which goes without saying")
        assert bool(place.dim) == (place.kind is Kind.SHARDED), self._at(f"{name}: {place.kind.value} of {place.dim}")
        assert place.dim in ("", *type.dims), self._at(f"{name}: shards no dim of its own")


class _Declarations(_Checker):
    """What stands before the region."""

    def check(self) -> None:
        it = self._program
        for what, names in (
            ("axis", [axis.name for axis in it.axes]),
            ("dim", [dim.name for dim in it.dims]),
            ("parameter", [param.name for param in it.params]),
            ("bucket", [bucket.name for bucket in it.buckets]),
            ("claim", [] if it.stage == FIRST else [(claim.dim, claim.axis) for claim in it.claims]),
        ):
            self._once(what, names)
        for name in (it.name, *self._axes, *(axis.whole for axis in it.axes), *self._sizes):
            assert name.isidentifier(), self._at(f"`{name}` is not a plain name")
        for each in (*it.axes, *it.dims):
            assert each.size >= 1, self._at(f"{each.name}: a size of {each.size}")
        for claim in it.claims:
            assert claim.dim in self._sizes, self._at(f"a claim of dim {claim.dim}, which is not declared")
            assert claim.axis in self._axes, self._at(f"a claim over axis {claim.axis}, which is not declared")
        for param in it.params:
            self._param(param)
        self._buckets()
        self._names()
        self._train()

    def _once(self, what: str, names: Collection[object]) -> None:
        assert len({*names}) == len(names), self._at(f"a {what} declared twice")

    def _param(self, param: Param) -> None:
        name, init = param.name, param.init
        assert name.isidentifier(), self._at(f"`{name}` is not a plain name")
        self._type(name, param.type)
        assert param.type.dtype in FLOATS, self._at(f"{name}: a parameter of {param.type.dtype}")
        counts = min(param.stacked, param.inner) >= 0 and param.stacked + param.inner <= len(param.type.dims)
        assert counts, self._at(f"{name}: stacked {param.stacked} inner {param.inner} of {len(param.type.dims)} dims")
        takes = INITS.get(init.kind)
        assert takes == len(init.args), self._at(f"{name}: there is no initial value {init.kind} of {len(init.args)}")
        assert all(arg >= 0 for arg in init.args), self._at(f"{name}: a negative deviation")

    def _names(self) -> None:
        """All parameters are stored, or none; of a tensor in parts all are there; what stands in pairs is in a head."""
        it = self._program
        stored, params = [each.param for each in it.names], [param.name for param in it.params]
        assert not stored or sorted(stored) == sorted(params), self._at("stored and other parameters differ")
        parts = Counter(each.tensor for each in it.names)
        for each in it.names:
            assert parts[each.tensor] == each.parts, self._at(
                f"{each.tensor}: {parts[each.tensor]} of {each.parts} parts"
            )
        self._once("stored part", [(each.tensor, each.part) for each in it.names])
        pairs = {each.param: each.interleaved for each in it.names if each.interleaved}
        for param in it.params:
            rows = param.type.dims[param.stacked : len(param.type.dims) - param.inner]
            head = self._sizes[rows[-1]] if len(rows) > 1 else 0
            assert pairs.get(param.name, 0) <= head, self._at(f"{param.name}: pairs in heads of {head} rows")

    def _buckets(self) -> None:
        it = self._program
        held = [name for bucket in it.buckets for name in bucket.params]
        fused = it.stage in STEP_STAGES[2:]
        want = sorted(p.name for p in it.params) if fused else []
        assert sorted(held) == want, self._at("buckets and parameters differ")
        for bucket in it.buckets:
            assert bucket.params, self._at(f"bucket {bucket.name} is empty")
            self._type(bucket.name, bucket.type)
        for names in products(it) if fused else ():
            (bucket,) = (bucket for bucket in it.buckets if names[0] in bucket.params)
            at = bucket.params.index(names[0])
            own = bucket.params[at : at + len(names)]
            assert own == names, self._at(f"{', '.join(names)} of one product lie as {', '.join(own)}")

    def _train(self) -> None:
        """The settings are those that the dims were made from."""
        it, train = self._program, self._program.train
        batch = train.microbatch * it.degree(tuple(claim.axis for claim in it.claims if claim.dim == "batch"))
        for dim, size in (("seq", train.seq), ("batch", batch), (MICROBATCHES, train.global_batch / batch)):
            said = f"dim {dim} is {self._sizes.get(dim, 'missing')}, but {size:g} by `train`"
            assert self._sizes.get(dim) == size, self._at(said)


INSIDE: dict[str, tuple[str, ...]] = {
    "model": ("repeat",),
    "step": (MICROBATCHES,),
    "microbatches": ("forward", "backward"),
    "forward": ("repeat",),
    "backward": ("repeat",),
    "repeat": ("repeat",),
}
"""Which regions may stand in which."""


class _Scope(_Checker):
    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._bound = {p.name for p in program.params}
        self._buckets = {bucket.name: bucket for bucket in program.buckets}
        self._params = {p.name: p.type for p in program.params}
        self._has_work = program.stage in WORK_STAGES
        self._depth = 0
        self._reversed = 0  # how many reversed repeats are around

    def outermost(self) -> None:
        """Checks the program's region, and what stands in it by the program's stage."""
        region = self._program.region
        kind = "step" if self._program.stage in STEP_STAGES else "model"
        assert region.kind == kind, self._at(f"a program after this pass is a {kind}, not a {region.kind}")
        self.region(region, dict(self._params))
        lasts = all(end.leave is Leave.LAST for end in region.yields)
        assert lasts, self._at(f"a {kind} yields last values")
        assert not region.results, self._at(f"a {kind} has results")
        if kind == "model":
            self._model(region)
        else:
            self._step(region)

    def _model(self, region: Region) -> None:
        leaves = [stmt.inputs[0] for stmt in region.body if isinstance(stmt, Op) and stmt.kind == "leaf"]
        assert leaves == [*self._params], self._at("leaves and parameters differ")
        assert len(region.yields) == 1, self._at("a model yields its loss")

    def _step(self, region: Region) -> None:
        inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
        assert len(inner) == 1, self._at("a step has one region of all microbatches")
        blocks = [stmt.kind for stmt in inner[0].body]
        assert blocks == ["forward", "backward"], self._at("microbatches are one forward and one backward")
        assert len(region.yields) == 3 + len(self._params), self._at(
            "a step yields loss, norm, count and its parameters"
        )
        for words in misbegun(self._program):
            raise AssertionError(self._at(words))

    def region(self, region: Region, outer: dict[str, Type]) -> dict[str, Type]:
        """Checks a region; returns the names that stay visible after it."""
        self._head(region)
        here = dict(outer)
        for arg in region.args:
            self._enter(arg, region, outer)
            self._bind(arg.value, here)
        self._body(region, here)
        for end in region.yields:
            assert end.name in here, self._at(f"{end.name} is yielded but not bound")
        carried = [arg.value.type for arg in region.args if arg.enter is Enter.CARRY]
        assert carried == [here[end.name] for end in region.yields if end.leave is Leave.LAST] or not region.dim, (
            self._at("carries")
        )
        assert len(region.yields) == len(region.results) or region.kind in ("model", "step"), self._at("results")
        after: dict[str, Type] = here if region.kind in ("forward", "backward") else {}
        for end, result in zip(region.yields, region.results, strict=False):
            self._leave(end, result, region, here)
            self._bind(result, after)
        return after

    def _head(self, region: Region) -> None:
        assert self._depth < MAX_DEPTH, self._at(f"regions nest deeper than {MAX_DEPTH}")
        looped = region.kind in ("repeat", MICROBATCHES)
        assert bool(region.dim) == looped, self._at(f"a {region.kind} over {region.dim or 'nothing'}")
        assert not looped or region.dim in self._sizes, self._at(f"{region.dim} is not declared")
        assert (region.kind == MICROBATCHES) == (region.dim == MICROBATCHES), self._at(
            f"a {region.kind} over {region.dim}"
        )
        assert not region.reverse or region.kind == "repeat", self._at(f"a {region.kind} reversed")
        takes = region.args or region.yields or region.results
        assert not takes or region.kind not in ("forward", "backward"), self._at(f"{region.kind} takes nothing")

    def _body(self, region: Region, here: dict[str, Type]) -> None:
        self._depth += 1
        self._reversed += region.reverse
        for stmt in region.body:
            if isinstance(stmt, Region):
                assert stmt.kind in INSIDE[region.kind], self._at(f"a {stmt.kind} in a {region.kind}")
                here |= self.region(stmt, here)
            else:
                self._op(stmt, here)
        self._depth -= 1
        self._reversed -= region.reverse

    def _op(self, op: Op, here: dict[str, Type]) -> None:
        assert op.kind in OPS, self._at(f"there is no op {op.kind}")
        for name in op.inputs:
            assert name in here, self._at(f"{name} is used before it is bound, in {op.kind}")
        operands = [here[name] for name in op.inputs]
        self._form(op)
        self._attributes(op, operands)
        try:
            types = OPS[op.kind].infer(self._program, operands, op)
        except (TypingError, LookupError, StopIteration) as error:  # the latter two: operands of too few dims
            raise AssertionError(self._at(f"{error} ({op.outputs[0].name if op.outputs else op.kind})")) from None
        assert len(types) == len(op.outputs), self._at(f"{op.kind} has {len(types)} results, not {len(op.outputs)}")
        for value, type in zip(op.outputs, types, strict=True):
            assert value.type == type, self._at(f"{value.name} is {value.type}, but {op.kind} makes {type}")
            self._bind(value, here)

    def _form(self, op: Op) -> None:
        """As many operands, and such attributes, as an op of the kind has."""
        entry, count = OPS[op.kind], len(op.inputs)
        assert entry.fits(count), self._at(f"{op.kind} of {count} operands")
        assert op.outputs or op.kind == "begin", self._at(f"{op.kind} without a result")
        wanted: dict[str, tuple[type, ...]] = {attribute.name: attribute.types for attribute in entry.attributes}
        if self._has_work and op.kind != "leaf":
            wanted["work"] = (tuple,)
        if op.kind == "update" and self._buckets:
            wanted["bucket"] = (str,)
        if self._reversed and "every" in dict(op.attrs):
            wanted["every"] = (int,)
        given, optional = (
            [key for key, _ in op.attrs],
            {a.name: a.default for a in entry.attributes if a.default is not None},
        )
        fits = len({*given}) == len(given) and {*wanted} - {*optional} <= {*given} <= {*wanted}
        assert fits, self._at(f"{op.kind} has {', '.join(wanted)}")
        assert all(value != optional.get(key) for key, value in op.attrs), self._at(f"{op.kind}: a default is written")
        for key, value in op.attrs:
            assert isinstance(value, wanted[key]), self._at(f"{op.kind}: {key} is not {wanted[key][0].__name__}")

    def _attributes(self, op: Op, operands: list[Type]) -> None:
        """What the attributes name is there."""
        for key, value in op.attrs:
            assert self._right(op, key, value, operands), self._at(f"{op.kind}: {key} = {value}")

    def _right(self, op: Op, key: str, value: Attr, operands: list[Type]) -> bool:
        match key:
            case "work":
                return self._works(op.names("work"), [*operands, *(v.type for v in op.outputs)])
            case "over":
                return _distinct(op.names("over"), set[str].intersection(*({*t.dims} for t in operands)))
            case "axes":
                source, target = ends(op)
                dims = {source.dim, target.dim} <= {"", *operands[0].dims}
                known = (source.kind, target.kind) in COERCIONS and source != target
                shards = all(bool(each.dim) == (each.kind is Kind.SHARDED) for each in (source, target))
                return bool(op.names("axes")) and _distinct(op.names("axes"), self._axes) and dims and known and shards
            case "dtype":
                return value in FLOATS
            case "max":
                return value == self._program.train.optimizer.clip
            case "mask":
                return value in OPS["attention"].attributes[0].choices
            case "every":
                return value == self._program.train.recompute.number
            case "bucket" if value not in self._buckets:
                return False
            case "bucket":
                return self._fits(op, self._buckets[str(value)], operands)
            case "p" | "dropout":
                return 0 < float(str(value)) < 1
            case "site":
                return int(str(value)) > 0
            case _:
                return True

    def _works(self, work: Iterable[str], types: list[Type]) -> bool:
        """Items are `axis:dim`, or `axis:*` for replicated work."""
        space = {dim for type in types for dim in type.dims} | {"*"}
        items = [item.partition(":") for item in work]
        return all(axis in self._axes and colon and dim in space for axis, colon, dim in items)

    def _fits(self, op: Op, bucket: Bucket, operands: list[Type]) -> bool:
        """All parameters of a bucket or their gradients, of a turn or stacked, and its whole or its gradient."""
        if op.kind == "update":
            return bucket.params == op.inputs[3:] and bucket.type == operands[0]
        flat = {"pack": [v.type for v in op.outputs], "unpack": operands, "begin": []}[op.kind]
        parts = [value.type for value in op.outputs] if op.kind == "unpack" else operands
        for type in flat:
            self._type(bucket.name, type)
        sizes = {self._program.local_size(type, bucket.dim) for type in flat if bucket.dim in type.dims}
        turn = [self._params[name].dims[len(bucket.turns) :] for name in bucket.params]
        own = [type.dims for type in parts] if flat and flat[0].dims == bucket.type.dims else []
        whole = own == [self._params[name].dims for name in bucket.params]
        return (whole or [type.dims for type in parts] == turn) and sizes <= {layout_of(self._program, bucket).size}

    def _enter(self, arg: Arg, region: Region, outer: dict[str, Type]) -> None:
        if region.kind in ("model", "step"):
            assert arg.source == arg.value.name, self._at(f"{arg.value.name} is made from {arg.source}")
            assert arg.enter is Enter.EACH, self._at(f"{arg.value.name} is carried into a {region.kind}")
            return
        assert arg.source in outer, self._at(f"{arg.source} enters a region before it is bound")
        source = outer[arg.source]
        assert arg.enter is not Enter.EACH or source.dims[:1] == (region.dim,), self._at(f"{arg.source} has no slices")
        expected = source.inside(region.dim) if arg.enter is Enter.EACH else source
        assert arg.value.type == expected, self._at(f"{arg.value.name} is {arg.value.type}, not {expected}")

    def _leave(self, end: Yield, result: Value, region: Region, here: dict[str, Type]) -> None:
        inner = here[end.name]
        expected = inner.stacked(region.dim) if end.leave is Leave.STACK else inner
        if (
            region.kind == MICROBATCHES
            and (pipeline := self._program.pipeline)
            and pipeline.axis in dict(result.type.places)
        ):
            places = dict(inner.places) | {pipeline.axis: PARTIAL}  # each rank has the sum of its own stages
            expected = evolve(expected, places=self._program.places(places))
        assert result.type == expected, self._at(f"{result.name} is {result.type}, not {expected}")

    def _bind(self, value: Value, here: dict[str, Type]) -> None:
        assert value.name not in self._bound, self._at(f"{value.name} is bound twice")
        self._type(value.name, value.type)
        self._bound.add(value.name)
        here[value.name] = value.type


def _distinct(names: tuple[str, ...], among: Collection[str]) -> bool:
    return len({*names}) == len(names) and all(name in among for name in names)
