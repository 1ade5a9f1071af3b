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
        """Checks that they agree with each other and with the settings."""
        program = self.program
        self._once("axis", [axis.name for axis in program.axes])
        self._once("dim", [dim.name for dim in program.dims])
        self._once("parameter", [param.name for param in program.params_and_buffers])
        self._once("buffer's route", [buffer.route for buffer in program.buffers])
        self._once("bucket", [bucket.name for bucket in program.buckets])
        if program.after != FIRST:
            self._once("claim", [(claim.dim, claim.axis) for claim in program.claims])
        parents = (axis.parent for axis in program.axes)
        for name in (program.name, *self.axes, *parents, *self.sizes):
            assert name.isidentifier(), f"`{name}` is not a plain name"
        for declared in (*program.axes, *program.dims):
            assert declared.size >= 1, f"{declared.name}: a size of {declared.size}"
        for claim in program.claims:
            assert claim.dim in self.sizes, f"a claim of dim {claim.dim}, which is not declared"
            assert claim.axis in self.axes, f"a claim over axis {claim.axis}, which is not declared"
        for param in program.params_and_buffers:
            self._param(param)
        for buffer in program.buffers:
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
        dims = len(param.type.dims)
        counts = min(param.stacked, param.inner) >= 0 and param.stacked + param.inner <= dims
        assert counts, f"{name}: stacked {param.stacked} inner {param.inner} of {dims} dims"
        takes = INITS.get(init.kind)
        assert takes == len(init.args), (
            f"{name}: there is no initial value {init.kind} of {len(init.args)}"
        )
        assert all(arg >= 0 for arg in init.args), f"{name}: a negative deviation"

    def _buffer(self, buffer: Buffer) -> None:
        """Checks that all ranks hold it alike, and that its route is there."""
        name, type = buffer.name, buffer.type
        assert (type.dtype, type.places) == ("f32", ()), f"{name}: a buffer of {type}"
        assert buffer.rate > 0, f"{name}: a rate of {buffer.rate}"
        assert buffer.route < self.program.routes, f"{name}: moved by load {buffer.route}"

    def _names(self) -> None:
        """Checks that all parameters are stored, or none; that a tensor in parts has all its parts;
        that interleaved rows fit in a head.
        """
        program = self.program
        stored = [part.param for part in program.names]
        params = [param.name for param in program.params_and_buffers]
        assert not stored or sorted(stored) == sorted(params), "stored and other parameters differ"
        parts = Counter(part.tensor for part in program.names)
        for part in program.names:
            assert parts[part.tensor] == part.parts, (
                f"{part.tensor}: {parts[part.tensor]} of {part.parts} parts"
            )
        self._once("stored part", [(part.tensor, part.part) for part in program.names])
        pairs = {part.param: part for part in program.names if part.interleaved}
        for param in program.params:
            part = pairs.get(param.name)
            if not part:
                continue
            rows = [
                *param.type.dims[len(program.outer(param)) : len(param.type.dims) - param.inner]
            ]
            head = 0
            if rows and (len(rows) > 1 or part.skipped):
                head = self.sizes[rows[-1]]
            assert part.skipped + part.interleaved <= head, (
                f"{param.name}: pairs in heads of {head} rows"
            )

    def _buckets(self) -> None:
        program = self.program
        names = list[str]()
        for bucket in program.buckets:
            names += bucket.params
        fused = program.after in STEP_PASSES[3:]
        wanted = sorted(param.name for param in program.params) if fused else []
        assert sorted(names) == wanted, "buckets and parameters differ"
        for bucket in program.buckets:
            assert bucket.params, f"bucket {bucket.name} is empty"
            self.type(bucket.name, bucket.type)

    def _train(self) -> None:
        """Checks that the dims were made from these settings."""
        program, train = self.program, self.program.train
        batch_axes = tuple(claim.axis for claim in program.claims if claim.dim == BATCH)
        batch = train.microbatch * program.degree(batch_axes)
        for dim, size in (
            (SEQUENCE, train.seq),
            (BATCH, batch),
            (MICROBATCHES, train.global_batch / batch),
        ):
            message = f"dim {dim} is {self.sizes.get(dim, 'missing')}, but {size:g} by `train`"
            assert self.sizes.get(dim) == size, message


PLACED_PASSES = STEP_PASSES[STEP_PASSES.index("place_stages") :]
"""After these passes rows that the compiler makes are there."""


class Stages(Checker):
    """The program's pipeline, if it has one."""

    def check(self) -> None:
        """Checks that stages and rows agree with the program's sizes."""
        pipeline = self.program.pipeline
        if not pipeline:
            return
        assert pipeline.axis in self.axes, (
            f"stages over axis {pipeline.axis}, which is not declared"
        )
        assert all(dim in self.sizes for dim in pipeline.dims), (
            "stages of a repeat whose dim is not declared"
        )
        if pipeline.stage_to_rank or pipeline.layers:
            self._stages(pipeline)
        for rows in filter(None, (pipeline.rows, pipeline.schedule)):
            self._rows(pipeline, rows)
        is_auto = pipeline.settings.schedule.kind == AUTO
        last = self.program.after == PLACED_PASSES[-1]
        if self.program.after in PLACED_PASSES and is_auto:
            assert pipeline.rows, "a pipeline without rows"
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
        """Checks that rows have these ranks, and do all the work of their stages in an order that
        works.
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
