"""The declarations before the region: axes, dims, claims, parameters, buckets, names, settings."""

from collections import Counter
from collections.abc import Collection

from ...ir import BATCH, FLOATS, MICROBATCHES, SEQUENCE, Buffer, Param
from .base import STEP_PASSES, Checker

FIRST = "resolve"
"""After this stage a claim may still occur twice: `validate` tells the user."""

INITS = {"normal": 1, "ones": 0, "zeros": 0}
"""Initial values, and how many numbers each takes."""


class Declarations(Checker):
    """The declarations before the region."""

    def check(self) -> None:
        """They agree with each other and with the settings."""
        it = self.program
        for what, names in (
            ("axis", [axis.name for axis in it.axes]),
            ("dim", [dim.name for dim in it.dims]),
            ("parameter", [param.name for param in it.stored]),
            ("buffer's route", [buffer.route for buffer in it.buffers]),
            ("bucket", [bucket.name for bucket in it.buckets]),
            ("claim", [] if it.after == FIRST else [(claim.dim, claim.axis) for claim in it.claims]),
        ):
            self._once(what, names)
        for name in (it.name, *self.axes, *(axis.parent for axis in it.axes), *self.sizes):
            assert name.isidentifier(), f"`{name}` is not a plain name"
        for each in (*it.axes, *it.dims):
            assert each.size >= 1, f"{each.name}: a size of {each.size}"
        for claim in it.claims:
            assert claim.dim in self.sizes, f"a claim of dim {claim.dim}, which is not declared"
            assert claim.axis in self.axes, f"a claim over axis {claim.axis}, which is not declared"
        for param in it.stored:
            self._param(param)
        for buffer in it.buffers:
            self._buffer(buffer)
        self._buckets()
        self._names()
        self._train()

    def _once(self, what: str, names: Collection[object]) -> None:
        assert len({*names}) == len(names), f"a {what} declared twice"

    def _param(self, param: Param) -> None:
        name, init = param.name, param.init
        assert name.isidentifier(), f"`{name}` is not a plain name"
        self.type(name, param.type)
        assert param.type.dtype in FLOATS, f"{name}: a parameter of {param.type.dtype}"
        counts = min(param.stacked, param.inner) >= 0 and param.stacked + param.inner <= len(param.type.dims)
        assert counts, f"{name}: stacked {param.stacked} inner {param.inner} of {len(param.type.dims)} dims"
        takes = INITS.get(init.kind)
        assert takes == len(init.args), f"{name}: there is no initial value {init.kind} of {len(init.args)}"
        assert all(arg >= 0 for arg in init.args), f"{name}: a negative deviation"

    def _buffer(self, it: Buffer) -> None:
        """All ranks hold it alike; its route is there."""
        assert (it.type.dtype, it.type.places) == ("f32", ()), f"{it.name}: a buffer of {it.type}"
        assert it.rate > 0, f"{it.name}: a rate of {it.rate}"
        assert it.route < self.program.routes, f"{it.name}: moved by load {it.route}"

    def _names(self) -> None:
        """All parameters are stored, or none; a tensor in parts has all its parts; interleaved rows fit in a head."""
        it = self.program
        stored, params = [each.param for each in it.names], [param.name for param in it.stored]
        assert not stored or sorted(stored) == sorted(params), "stored and other parameters differ"
        parts = Counter(each.tensor for each in it.names)
        for each in it.names:
            assert parts[each.tensor] == each.parts, f"{each.tensor}: {parts[each.tensor]} of {each.parts} parts"
        self._once("stored part", [(each.tensor, each.part) for each in it.names])
        pairs = {each.param: each for each in it.names if each.interleaved}
        for param in it.params:
            rows = [*param.type.dims[len(it.outer(param)) : len(param.type.dims) - param.inner]]
            if each := pairs.get(param.name):
                head = sum(self.sizes[dim] for dim in rows[-1:]) if len(rows) > 1 or each.skipped else 0
                assert each.skipped + each.interleaved <= head, f"{param.name}: pairs in heads of {head} rows"

    def _buckets(self) -> None:
        it = self.program
        held = [name for bucket in it.buckets for name in bucket.params]
        fused = it.after in STEP_PASSES[3:]
        want = sorted(p.name for p in it.params) if fused else []
        assert sorted(held) == want, "buckets and parameters differ"
        for bucket in it.buckets:
            assert bucket.params, f"bucket {bucket.name} is empty"
            self.type(bucket.name, bucket.type)

    def _train(self) -> None:
        """The settings are those that the dims were made from."""
        it, train = self.program, self.program.train
        batch = train.microbatch * it.degree(tuple(claim.axis for claim in it.claims if claim.dim == BATCH))
        for dim, size in ((SEQUENCE, train.seq), (BATCH, batch), (MICROBATCHES, train.global_batch / batch)):
            said = f"dim {dim} is {self.sizes.get(dim, 'missing')}, but {size:g} by `train`"
            assert self.sizes.get(dim) == size, said
