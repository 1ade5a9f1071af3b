"""Pipelines: stages with all layers of what is cut, on ranks that there are, and rows that do their work."""

from ...config.settings import AUTO
from ...ir import MICROBATCHES, Pipeline
from ...schedules.actions import Schedule
from ...schedules.check import problems
from .base import STEP_PASSES, Checker

PLACED_PASSES = STEP_PASSES[STEP_PASSES.index("place_stages") :]
"""After these passes rows that the compiler makes are there."""


class Stages(Checker):
    """The program's pipeline, if it has one."""

    def check(self) -> None:
        """Stages and rows agree with the program's sizes."""
        if not (pipeline := self.program.pipeline):
            return
        assert pipeline.axis in self.axes, f"stages over axis {pipeline.axis}, which is not declared"
        assert all(dim in self.sizes for dim in pipeline.dims), "stages of a repeat whose dim is not declared"
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
        assert {*stage_to_rank} == ranks, f"stages lie on ranks {sorted({*stage_to_rank})} of {len(ranks)}"
        params = {param.name for param in self.program.params}
        for name, stages in pipeline.param_stages:
            assert name in params, f"stages hold {name}, which is no parameter"
            assert {*stages} <= {*range(len(stage_to_rank))}, f"{name}: held by a stage that there is not"

    def _rows(self, pipeline: Pipeline, rows: Schedule) -> None:
        """Rows are of these ranks, and do all the work of their stages in an order in which it can be done."""
        ranks, microbatches = self.program.axis(pipeline.axis).size, self.sizes.get(MICROBATCHES, 0)
        assert rows.ranks == ranks, f"rows of {rows.ranks} ranks, the axis has {ranks}"
        assert rows.microbatches == microbatches, f"rows of {rows.microbatches} of {microbatches} microbatches"
        fits = rows.stage_to_rank == (pipeline.stage_to_rank or rows.stage_to_rank)
        assert fits, "the ranks of rows are not those of stage_to_rank"
        for problem in problems(rows):
            raise AssertionError(f"rows of rank {problem.rank}: {problem.why}")
