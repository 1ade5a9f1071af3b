"""Seconds of each op where it runs, with what the GPU waits for there: the walk of the step, written down.

Non-goals: pipelines (`pipeline.Rows`).
"""

from collections.abc import Mapping
from statistics import median

from attrs import frozen

from ...ir import MICROBATCHES, Op, Program
from ..hardware import Hardware
from .prices import Prices, prices
from .timeline import Walk


@frozen
class OpSeconds:
    """Seconds of a microbatch, of all that is done once a step, and of each op by the name of its first result.

    The ops of a microbatch are those of one iteration of their repeats.
    """

    microbatch: float
    once: float
    ops: Mapping[str, float]


def op_seconds(program: Program, on: Hardware) -> OpSeconds:
    """The seconds of the ops of a program after the last pass that has no pipeline."""
    watch = _Stopwatch(program, on, prices(program, on))
    watch.step()
    took = {name: median(each) for name, each in watch.took.items()}
    once = sum(took[_name(stmt)] for stmt in program.region.body if isinstance(stmt, Op) and _name(stmt) in took)
    return OpSeconds((watch.clocks.gpu - once) / program.size(MICROBATCHES), once, took)


class _Stopwatch(Walk):
    """A walk that notes by how much each op moves the GPU's clock on."""

    def __init__(self, program: Program, on: Hardware, prices: Prices) -> None:
        super().__init__(program, on, prices)
        self.took: dict[str, list[float]] = {}
        self._runs = False

    def _op(self, op: Op, kind: str = "") -> None:
        before, self._runs = self.clocks.gpu, True
        super()._op(op, kind)
        self._runs = False
        self._note(op, before)

    def _await(self, op: Op, end: float) -> None:
        """A wait of an op that runs is a part of it; one for a layer's parameters is noted as the gather's."""
        before = self.clocks.gpu
        super()._await(op, end)
        if not self._runs:
            self._note(op, before)

    def _note(self, op: Op, before: float) -> None:
        self.took.setdefault(_name(op), []).append(self.clocks.gpu - before)


def _name(op: Op) -> str:
    return op.outputs[0].name if op.outputs else ""
