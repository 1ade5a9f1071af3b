"""Random plans of up to five axes with experts: each is refused, or is proved and reads back, as IR
and as a program.

Non-goals: numbers, which `end_to_end/test_context_and_experts.py` has of every pair.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from helpers.random_models.five_axes import plans
from scalec.compiler.emit import emit
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

PLANS, MORE = 8, 150
"""So many, and with `--long` so many more."""
REFUSED = 1 / 3


@pytest.mark.long
@pytest.mark.parametrize("number", [PLANS, pytest.param(MORE, marks=pytest.mark.long)])
def test_what_compiles_is_proved_and_reads_back(number: int) -> None:
    """`emit` reads the program back, too; what is refused has a code, and few are."""
    refused = Counter[str]()

    @settings(max_examples=number, suppress_health_check=[HealthCheck.too_slow])
    @given(plans())
    def holds(plan: str) -> None:
        source = Source("plan.scale", plan)
        try:
            model = compile_plan(source, "resolve")
            program = lower(model)
        except PlanError as error:
            refused[error.diagnostics[0].code] += 1
            return
        verify(program, model)
        for each in (model, program):
            assert read_ir(Source("plan.ir", print_ir(each))) == each
        emit(program, source)

    holds()
    assert refused.total() <= REFUSED * number, refused
