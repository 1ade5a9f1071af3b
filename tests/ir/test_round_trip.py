"""IR text of any level, read back, has the proof and the program of the plan that it was printed
from.

A proof against IR text takes the forward in that text for the model, so it evaluates ops that no
plan has: those that passes write.  Non-goals: equality of programs (`test_text`).
"""

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings

from helpers.plan_table import PLANS
from helpers.random_models import five_axes
from scalec.compiler.analysis.certificate import Proof
from scalec.compiler.emit import emit
from scalec.compiler.frontend import resolve
from scalec.compiler.ir import Program
from scalec.compiler.ir.parser import read_ir
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower
from scalec.testing import plans

SHIPPED = sorted((Path(__file__).parents[2] / "plans").glob("*.scale"))
KNOWN_BY = "    model=", "    unpadded="
"""Lines of a program with the hash of its model, which only text of a model before any
placement has.
"""

EXPERTS_OVER_TOKENS = """
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 8  experts = 4  ffn = 8  layers = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    m = rmsnorm(x, norm[hidden], 1e-5)
    route m to experts by top(m @ router[hidden -> experts], 2, normalise=on) {
      m = silu(m @ e_in[hidden -> ffn]) @ e_out[ffn -> hidden]
    }
    x = x + m
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2 }
shard { experts over dp  batch over dp }
train {
  seq = 8  global_batch = 4  microbatch = 1  steps = 3  seed = 0  precision = fp32
  optimizer sgd { lr = 0.1 }
  data text { files = ["unused"] }
}
"""


def levels(model: Program) -> tuple[Program, ...]:
    """The program of a model after each pass that changed it; the last one is what is emitted."""
    programs = list[Program]()

    def keep(program: Program) -> None:
        if not programs or evolve(program, after=programs[-1].after) != programs[-1]:
            programs.append(program)

    last = lower(model, seen=keep)
    return *programs[:-1], last


def shown_results(proof: Proof) -> Proof:
    """What a proof shows, without what it compared with and the bound, which follows from the
    forward's degree.
    """
    return evolve(proof, against="", bound=0)


def lines_of_program(program: Program, model: Program, source: Source) -> list[str]:
    """The lines of train.py but the hash of the model."""
    text = emit(program, source, model)["train.py"]
    return [line for line in text.split("\n") if not line.startswith(KNOWN_BY)]


def check_levels(source: Source, wanted: int | None = None) -> None:
    """The text of each level, or of the level `wanted`, gives the same proof and the same
    train.py as the plan.
    """
    model = resolve(source)
    programs = levels(model)
    last = programs[-1]
    proof = shown_results(verify(last, model))
    lines = lines_of_program(last, model, source)
    for program in programs if wanted is None else [programs[wanted % len(programs)]]:
        text = Source(source.path, print_ir(program))
        forward = read_ir(text)
        lowered = lower(forward)
        assert lowered == last, program.after
        assert shown_results(verify(lowered, forward)) == proof, program.after
        assert lines_of_program(lowered, forward, text) == lines, program.after


def test_experts_over_an_axis_of_tokens() -> None:
    """Exchanges that begin early end in the op `wait`, whose value is its operand."""
    check_levels(Source("plan.scale", EXPERTS_OVER_TOKENS))


@pytest.mark.sample(1)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_last_level_of_shipped_plans(path: Path) -> None:
    check_levels(load(path), -1)


@pytest.mark.long
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_level_of_shipped_plans(path: Path) -> None:
    check_levels(load(path))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANS)
def test_every_level_of_small_plans(name: str) -> None:
    check_levels(Source("tiny.scale", PLANS[name].text()))


def _check_one_level(plan: str) -> None:
    """Checks a level that the plan's length chooses: another draw would change which plans are
    drawn.
    """
    source = Source("plan.scale", plan)
    try:
        lower(resolve(source))
    except PlanError:
        return
    check_levels(source, len(plan))


@settings(max_examples=6)
@given(plans())
def test_a_level_of_random_plans(plan: str) -> None:
    _check_one_level(plan)


@pytest.mark.long
@settings(max_examples=4, suppress_health_check=[HealthCheck.too_slow])
@given(five_axes.plans())
def test_a_level_of_random_plans_of_five_axes(plan: str) -> None:
    _check_one_level(plan)
