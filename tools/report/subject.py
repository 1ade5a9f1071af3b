"""A compiled plan, as a report takes it."""

from attrs import frozen

from ...compiler.analysis.certificate import Proof
from ...compiler.analysis.hardware import Hardware, hardware
from ...compiler.analysis.time import get_expected_report
from ...compiler.analysis.time.report import Neighbour, Report
from ...compiler.ir import Program
from ...compiler.syntax.source import Source


@frozen
class Subject:
    """A plan's text, its program before any placement and after the last pass, and its proof if
    there was one.

    `neighbours` are other plans that are worth a look; None where nothing looked for any.
    """

    source: Source
    model: Program
    program: Program
    proof: Proof | None = None
    neighbours: tuple[Neighbour, ...] | None = None

    @property
    def time(self) -> Report | None:
        """The time of a step, None where the speed of its GPUs is not known."""
        return get_expected_report(self.program)

    @property
    def hardware(self) -> Hardware | None:
        """The hardware that the plan names, None where its speed is not known."""
        names_hardware = self.program.cluster.gpu or self.program.cluster.hardware
        return hardware(self.program) if names_hardware else None
