"""Plans with a pipeline, for the tests of what runs its rows."""

from functools import cache
from pathlib import Path

from attrs import evolve

from helpers.plan_table import PLANS
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

MODELS = Path(__file__).parents[2] / "plans"


def piped(name: str, schedule: str = "1f1b", pp: int = 2, layers: int = 4, stages: str = "") -> str:
    """A plan of the table, its outermost repeats over an axis more."""
    plan = PLANS[name]
    cut = [dim for dim in ("layers", "blocks") if f"repeat {dim}" in plan.body]
    dims = plan.dims.replace("layers = 2", f"layers = {layers}")
    rule = f"{', '.join(cut)} over pp"
    plan = evolve(
        plan,
        mesh=f"pp = {pp}  {plan.mesh}",
        dims=dims,
        shard="  ".join(filter(None, [plan.shard, rule])),
    )
    return (
        f"{plan.text()}\npipeline {{ schedule = {schedule} "
        f" {f'stages = [{stages}]' if stages else ''} }}\n"
    )


def of_model(file: str, dims: str, tp: str, cut: str, schedule: str, pp: int) -> str:
    """A model that ships, small."""
    return f"""use "models/{file}.scale" {{ dims {{ {dims} }} }}
mesh {{ pp = {pp}  dp = 2  tp = 2 }}
shard {{ batch over dp  {tp} over tp  seq over tp  {cut} over pp }}
state {{ zero 1 over dp }}
pipeline {{ schedule = {schedule} }}
train {{
  seq = 8  global_batch = 16  microbatch = 2  steps = 1  precision = bf16
  optimizer sgd {{ lr = 0.5  clip = 1.0 }}
  data text {{ files = [python_stdlib] }}
}}
"""


@cache
def compiled(text: str) -> tuple[Program, Program]:
    """The program of a plan's text after the last pass, and its model."""
    model = compile_plan(Source(str(MODELS / "piped.scale"), text), "resolve")
    return lower(model), model
