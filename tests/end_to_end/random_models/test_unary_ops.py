"""Every op of one operand in one plan on four ranks: proved, and trained as plain torch trains
it, in float64.
"""

from pathlib import Path

import pytest

from helpers.oracle.compare import assert_same
from helpers.random_models.trials import Trial
from helpers.unary_ops import UNARY, goes_over_one, make_call
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

LINE = "x = x + {call} @ v_{name}[ffn -> hidden]"
PLAN = """model unary(tokens[batch, seq], labels[batch, seq]) bidirectional {
  dims { vocab = 12  hidden = 8  ffn = 6 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  {body}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { dp = 2  tp = 2 }
shard { batch over dp  ffn over tp }
train {
  seq = 5  global_batch = 4  microbatch = 1  steps = 1  precision = fp64  recompute = none
  optimizer sgd { lr = 0.5 }
  data text { files = [python_stdlib] }
}
"""


def line(name: str, over: str) -> str:
    """The op of a sharded value, over a dim if it goes over one."""
    return LINE.format(name=name, call=make_call(name, f"(x @ w_{name}[hidden -> ffn])", over))


def plan(*lines: str) -> str:
    return PLAN.replace("{body}", "\n  ".join(lines))


def test_all_are_proved_and_train_as_torch_does(tmp_path: Path) -> None:
    over_last = [f"x = x + {make_call(name, 'x')}" for name in UNARY if goes_over_one(name)]
    text = plan(*(line(name, "seq") for name in UNARY), *over_last)
    model = compile_plan(Source("plan.scale", text), "resolve")
    verify(lower(model), model)
    trial = Trial.of(text, tmp_path)
    for got, want in zip(trial.emitted(), trial.expected(), strict=True):
        assert_same(got, want, "")


@pytest.mark.parametrize("name", [name for name in UNARY if goes_over_one(name)])
def test_the_dim_that_an_op_goes_over_is_not_sharded(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", plan(line(name, "ffn"))))
    (error,) = caught.value.diagnostics
    assert error.code == "E0601"
    assert f"`{name}` needs `ffn` whole on each rank, but `ffn` is over `tp`" in str(caught.value)
