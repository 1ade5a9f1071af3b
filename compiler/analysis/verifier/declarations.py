"""The declarations before the region: axes, dims, claims, parameters, buckets, names, settings,
stages.
"""

from collections import Counter
from collections.abc import Collection

from ...config.settings import AUTO
from ...ir import BATCH, FLOATS, MICROBATCHES, SEQUENCE, Buffer, Param, Pipeline
from ...schedules.actions import Schedule
from ...schedules.check import problems
from .checker import STEP_PASSES, Checker

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
            (
                "claim",
                [] if it.after == FIRST else [(claim.dim, claim.axis) for claim in it.claims],
            ),
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
        counts = min(param.stacked, param.inner) >= 0 and param.stacked + param.inner <= len(
            param.type.dims
        )
        assert counts, (
            f"{name}: stacked {param.stacked} inner {param.inner} of {len(param.type.dims)} dims"
        )
        takes = INITS.get(init.kind)
        assert takes == len(init.args), (
            f"{name}: there is no initial value {init.kind} of {len(init.args)}"
        )
        assert all(arg >= 0 for arg in init.args), f"{name}: a negative deviation"

    def _buffer(self, it: Buffer) -> None:
        """All ranks hold it alike; its route is there."""
        assert (it.type.dtype, it.type.places) == ("f32", ()), f"{it.name}: a buffer of {it.type}"
        assert it.rate > 0, f"{it.name}: a rate of {it.rate}"
        assert it.route < self.program.routes, f"{it.name}: moved by load {it.route}"

    def _names(self) -> None:
        """All parameters are stored, or none; a tensor in parts has all its parts; interleaved
        rows fit in a head.
        """
        it = self.program
        stored, params = [each.param for each in it.names], [param.name for param in it.stored]
        assert not stored or sorted(stored) == sorted(params), "stored and other parameters differ"
        parts = Counter(each.tensor for each in it.names)
        for each in it.names:
            assert parts[each.tensor] == each.parts, (
                f"{each.tensor}: {parts[each.tensor]} of {each.parts} parts"
            )
        self._once("stored part", [(each.tensor, each.part) for each in it.names])
        pairs = {each.param: each for each in it.names if each.interleaved}
        for param in it.params:
            rows = [*param.type.dims[len(it.outer(param)) : len(param.type.dims) - param.inner]]
            if each := pairs.get(param.name):
                head = (
                    sum(self.sizes[dim] for dim in rows[-1:])
                    if len(rows) > 1 or each.skipped
                    else 0
                )
                assert each.skipped + each.interleaved <= head, (
                    f"{param.name}: pairs in heads of {head} rows"
                )

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
        batch = train.microbatch * it.degree(
            tuple(claim.axis for claim in it.claims if claim.dim == BATCH)
        )
        for dim, size in (
            (SEQUENCE, train.seq),
            (BATCH, batch),
            (MICROBATCHES, train.global_batch / batch),
        ):
            said = f"dim {dim} is {self.sizes.get(dim, 'missing')}, but {size:g} by `train`"
            assert self.sizes.get(dim) == size, said


PLACED_PASSES = STEP_PASSES[STEP_PASSES.index("place_stages") :]
"""After these passes rows that the compiler makes are there."""


class Stages(Checker):
    """The program's pipeline, if it has one."""

    def check(self) -> None:
        """Stages and rows agree with the program's sizes."""
        if not (pipeline := self.program.pipeline):
            return
        assert pipeline.axis in self.axes, (
            f"stages over axis {pipeline.axis}, which is not declared"
        )
        assert all(dim in self.sizes for dim in pipeline.dims), (
            "stages of a repeat whose dim is not declared"
        )
        if pipeline.stage_to_rank or pipeline.layers:
            self._stages(pipeline)
        for rows in filter(None, (pipeline.given, pipeline.schedule)):
            self._rows(pipeline, rows)
        made = self.program.after in PLACED_PASSES and pipeline.settings.schedule.kind == AUTO
        last = self.program.after == PLACED_PASSES[-1]
        assert pipeline.given or not made, "a pipeline without rows"
        assert pipeline.schedule or not last, "a pipeline without rows"

    def _stages(self, pipeline: Pipeline) -> None:
        layers, stage_to_rank = pipeline.layers, pipeline.stage_to_rank
        counts = len(layers), len(stage_to_rank)
        assert counts[0] == counts[1], f"layers of {counts[0]} stages, stage_to_rank of {counts[1]}"
        total = sum(self.sizes[dim] for dim in pipeline.dims)
        assert sum(layers) == total, f"stages have {sum(layers)} iterations, the repeats {total}"
        assert all(layers[1:-1]), "a stage in the middle has no layers"
        ranks = {*range(self.program.axis(pipeline.axis).size)}
        assert {*stage_to_rank} == ranks, (
            f"stages lie on ranks {sorted({*stage_to_rank})} of {len(ranks)}"
        )
        params = {param.name for param in self.program.params}
        for name, stages in pipeline.param_stages:
            assert name in params, f"stages hold {name}, which is no parameter"
            assert {*stages} <= {*range(len(stage_to_rank))}, (
                f"{name}: held by a stage that there is not"
            )

    def _rows(self, pipeline: Pipeline, rows: Schedule) -> None:
        """Rows are of these ranks, and do all the work of their stages in an order in which it
        can be done.
        """
        ranks, microbatches = self.program.axis(pipeline.axis).size, self.sizes.get(MICROBATCHES, 0)
        assert rows.ranks == ranks, f"rows of {rows.ranks} ranks, the axis has {ranks}"
        assert rows.microbatches == microbatches, (
            f"rows of {rows.microbatches} of {microbatches} microbatches"
        )
        fits = rows.stage_to_rank == (pipeline.stage_to_rank or rows.stage_to_rank)
        assert fits, "the ranks of rows are not those of stage_to_rank"
        for problem in problems(rows):
            raise AssertionError(f"rows of rank {problem.rank}: {problem.why}")
