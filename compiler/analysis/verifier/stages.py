"""Pipelines: stages with all turns of what is cut, on ranks that there are, and rows that do their work."""

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
        """What stages and rows are counted by agrees with the program."""
        if not (pipeline := self.program.pipeline):
            return
        assert pipeline.axis in self.axes, self.at(f"stages over axis {pipeline.axis}, which is not declared")
        assert all(dim in self.sizes for dim in pipeline.dims), self.at("stages of a repeat whose dim is not declared")
        if pipeline.homes or pipeline.turns:
            self._stages(pipeline)
        for rows in filter(None, (pipeline.given, pipeline.schedule)):
            self._counts(pipeline, rows)
        made = self.program.after in PLACED_PASSES and pipeline.settings.schedule.kind == AUTO
        last = self.program.after == PLACED_PASSES[-1]
        assert pipeline.given or not made, self.at("a pipeline without rows")
        assert pipeline.schedule or not last, self.at("a pipeline without rows")

    def check_rows(self) -> None:
        """Rows do all the work of their stages, in an order in which it can be done."""
        pipeline = self.program.pipeline
        for rows in filter(None, (pipeline.given, pipeline.schedule) if pipeline else ()):
            for problem in problems(rows):
                raise AssertionError(self.at(f"rows of rank {problem.rank}: {problem.why}"))

    def _stages(self, pipeline: Pipeline) -> None:
        turns, homes = pipeline.turns, pipeline.homes
        assert len(turns) == len(homes), self.at(f"turns of {len(turns)} stages, homes of {len(homes)}")
        total = sum(self.sizes[dim] for dim in pipeline.dims)
        assert sum(turns) == total, self.at(f"stages have {sum(turns)} iterations, the repeats {total}")
        assert all(turns[1:-1]), self.at("a stage in the middle has no turns")
        ranks = {*range(self.program.axis(pipeline.axis).size)}
        assert {*homes} == ranks, self.at(f"stages lie on ranks {sorted({*homes})} of {len(ranks)}")
        params = {param.name for param in self.program.params}
        for name, stages in pipeline.held:
            assert name in params, self.at(f"stages hold {name}, which is no parameter")
            assert {*stages} <= {*range(len(homes))}, self.at(f"{name}: held by a stage that there is not")

    def _counts(self, pipeline: Pipeline, rows: Schedule) -> None:
        ranks, microbatches = self.program.axis(pipeline.axis).size, self.sizes.get(MICROBATCHES, 0)
        assert rows.ranks == ranks, self.at(f"rows of {rows.ranks} ranks, the axis has {ranks}")
        assert rows.microbatches == microbatches, self.at(f"rows of {rows.microbatches} of {microbatches} microbatches")
        assert rows.homes == (pipeline.homes or rows.homes), self.at("rows have stages on other ranks than their homes")
