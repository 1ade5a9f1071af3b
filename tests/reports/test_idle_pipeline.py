"""W0907: when ranks of a pipeline wait long, by the formulas of the schedules' papers."""

import pytest

from scalec.compiler.reports.idle_pipeline import ENOUGH, bubble, idle_pipeline
from scalec.compiler.syntax.diagnostics import Diagnostic
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = """
model m(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 16  ffn = 32  layers = 16 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers { x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden] }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { pp = RANKS }
shard { layers over pp }
pipeline { schedule = ORDER }
train {
  seq = 8  global_batch = COUNT  microbatch = 1  steps = 1
  optimizer sgd { lr = 0.5 }
  data text { files = [python_stdlib] }
}
"""


def warned(ranks: int, microbatches: int, order: str = "1f1b") -> list[Diagnostic]:
    """The warnings of a plan with these sizes."""
    text = (
        PLAN.replace("RANKS", f"{ranks}")
        .replace("COUNT", f"{microbatches}")
        .replace("ORDER", order)
    )
    return [*idle_pipeline(compile_plan(Source("plan.scale", text)))]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("times", [1, 1.5, 2, 3, 4, 5])
def test_one_forward_one_backward_warns_below_two_microbatches_a_rank(
    ranks: int, times: float
) -> None:
    """Its bubble is (p - 1)/(m + p - 1) (arXiv 2006.09503): more than a third for p > 2 and m =
    p, not for m = 2p.
    """
    microbatches = int(ranks * times)
    expected = (ranks - 1) / (microbatches + ranks - 1)
    found = warned(ranks, microbatches)
    assert bool(found) == (expected > 1 / 3)
    if found:
        assert found[0].message == (
            f"ranks of `pp` wait {expected:.0%} of the step: {ranks} ranks have only"
            f" {microbatches} microbatches"
        )


def test_the_help_has_the_shares_of_the_papers() -> None:
    """With f = b = w = 1, p = m = 8: (p - 1)(f + b - w) beside 3m for zero bubbles, by its
    chunks for two of them.
    """
    ranks = microbatches = 8
    (found,) = warned(ranks, microbatches)
    enough = ENOUGH * ranks
    left = (ranks - 1) / (enough + ranks - 1)
    chunked = (ranks - 1) / (2 * 3 * microbatches + ranks - 1)
    more, first, second = (found.help or "").split("\n")
    assert more.startswith("make at least 32 microbatches")
    assert more.endswith(f": {left:.0%}")
    assert first.startswith(
        f"or write `schedule = interleaved_zero_bubble(chunks=2)`: {chunked:.0%}"
    )
    assert second.startswith("or write `schedule = ")


def test_a_schedule_that_fills_the_bubble_is_not_warned_of() -> None:
    assert warned(8, 8)
    assert not warned(8, 8, "interleaved_zero_bubble(chunks=2)")
    assert not warned(8, 8, "zb_h1")


def test_schedules_for_which_there_are_too_few_layers_are_not_named() -> None:
    """Sixteen layers on sixteen ranks leave one stage a rank."""
    (found,) = warned(16, 16)
    assert "chunks" not in (found.help or "")
    assert "zb_h1" in (found.help or "")


def test_stages_of_the_plan_are_kept() -> None:
    order = "1f1b  stages = [4, 4, 4, 4]"
    (found,) = warned(4, 4, order)
    assert "or write" not in (found.help or "")


def test_messages_take_no_time() -> None:
    """The rows of a plan have messages; those of a named schedule have none: both have the same
    bubble.
    """
    text = PLAN.replace("RANKS", "4").replace("COUNT", "4").replace("ORDER", "1f1b")
    program = compile_plan(Source("plan.scale", text))
    assert program.pipeline
    assert program.pipeline.schedule
    assert bubble(program.pipeline.schedule) == pytest.approx(3 / 7)
