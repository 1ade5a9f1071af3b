"""The account of a pipeline's ranks against what these hold, to the byte; and the fullest
moment of their rows.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers.measured_memory import measure_stages, peaks
from helpers.memory_plans import compiled
from helpers.oracle.plans import Case, plan_text
from helpers.proof_pipelines import piped
from helpers.uneven_stages import unlike
from scalec.compiler.analysis.expert_loads import with_load
from scalec.compiler.analysis.memory import account, accounts
from scalec.compiler.analysis.memory.account import accounts_of
from scalec.compiler.analysis.memory.pipeline_peak import stages_of
from scalec.compiler.schedules.registry import SCHEDULES

SP = Case(pp=2, tp=2, sp=True, microbatches=4, layers=5, optimizer="adamw")
CASES = {
    "1f1b": SP,
    "16 bit": replace(SP, precision="bf16", model="tied"),
    "interleaved": replace(SP, schedule="interleaved_1f1b(chunks=2)", optimizer="momentum"),
    "shared state": Case(
        pp=2, dp=2, microbatches=2, layers=4, state="zero 1 over dp", optimizer="groups"
    ),
    "freed when stages end": Case(
        pp=2,
        dp=2,
        microbatches=4,
        layers=5,
        state="zero 3 over dp",
        schedule="interleaved_1f1b(chunks=2)",
        model="tied",
    ),
    "tied over some ranks": Case(pp=4, microbatches=4, layers=5, model="tied"),
    "layers again": replace(SP, recompute="full"),
    "some layers again": replace(SP, recompute="every(2, layers)", schedule="zbv"),
    "ops again": replace(SP, recompute="selective(attention, silu)", gathered="regather"),
    "every op": replace(SP, model="every", kv=4),
    "experts": Case(
        pp=2, ep=2, model="two", experts="ep", microbatches=2, layers=4, schedule="zb_h1"
    ),
    "experts with losses": replace(SP, model="losses", experts="tp", recompute="full", layers=4),
    "fused": replace(SP, kernels="triton", precision="bf16"),
    "fused, vocabulary whole": replace(
        SP, kernels="triton", vocab=False, model="tied", schedule="zb_h1"
    ),
}
BIASED = {
    f"{name}, bias": plan_text(CASES[name]).replace(head, f"{head} + b_head[vocab]")
    for name, head in (("fused", "@ head[hidden -> vocab]"), ("fused, vocabulary whole", "@ wte"))
}
TEXTS = (
    {name: plan_text(case) for name, case in CASES.items()}
    | BIASED
    | {"cuts that differ": unlike()}
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TEXTS)
def test_the_account_is_what_ranks_hold(name: str, tmp_path: Path) -> None:
    module, program = compiled(TEXTS[name], tmp_path)
    program = with_load(program, 1)
    of_stages, of_ranks = stages_of(program), accounts_of(program)
    measured = measure_stages(module, module.PLAN.global_batch)
    inside = len(measured) // len(of_ranks)
    for number, rank in enumerate(measured):
        it = of_ranks[number // inside]
        assert (rank.state, rank.tables, rank.inputs) == (it.state, it.tables, it.inputs)
        assert rank.kept == {stage: of_stages[stage].microbatch_bytes for stage in rank.kept}


SHAPES = {
    "many logits": ("1f1b", 1024, 192, 4),
    "wide layers": ("1f1b", 64, 768, 4),
    "interleaved": ("interleaved_1f1b(chunks=2)", 256, 256, 6),
    "all forwards first": ("gpipe", 256, 256, 4),
    "weights apart": ("zb_h1", 256, 256, 4),
    "v": ("zbv", 256, 256, 4),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_fullest_moment(shape: str, precision: str, recompute: str, tmp_path: Path) -> None:
    options = f"precision = {precision}  recompute = {recompute}"
    _check_fullest(_text(*SHAPES[shape], dp=1, state="", options=options), tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_rank(schedule: str, ranks: int, tmp_path: Path) -> None:
    """As many layers as ranks and chunks divide, so that ranks differ by little."""
    text = _text(schedule, 192, 192, 2 * ranks, dp=1, state="", options="precision = fp32")
    module, program = compiled(text.replace("pp = 2", f"pp = {ranks}"), tmp_path)
    found, measured = accounts(program), peaks(module, module.PLAN.global_batch)
    assert [it.peak.bytes for it in found] == pytest.approx(measured, rel=0.001), found
    held = [it.always + peak for it, peak in zip(found, measured, strict=True)]
    assert account(program).rank == held.index(max(held))


def test_two_values_that_begin_as_one_are_two_messages(tmp_path: Path) -> None:
    """The sum that leaves the layers is a sum's term and a repeat's carry: its gradients come
    back apart.
    """
    module, program = compiled(piped("a sum that a sum and a repeat use", "zb_h1"), tmp_path)
    found = [it.peak.bytes for it in accounts(program)]
    assert found == pytest.approx(peaks(module, module.PLAN.global_batch), rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("options", ["precision = fp32", "precision = bf16  reduce = bf16"])
def test_the_fullest_moment_of_shared_state(options: str, tmp_path: Path) -> None:
    _check_fullest(
        _text("gpipe", 1024, 1536, 4, dp=2, state="zero 3 over dp", options=options), tmp_path
    )


def _text(
    schedule: str, vocab: int, ffn: int, layers: int, dp: int, state: str, options: str
) -> str:
    return f"""use "models/llama.scale" {{
  dims {{ vocab = {vocab}  hidden = 64  heads = 4  kv_heads = 2  ffn = {ffn}  layers = {layers} }}
}}
mesh {{ pp = 2  dp = {dp} }}
shard {{ {"batch over dp" if dp > 1 else ""}  layers over pp }}
state {{ {state} }}
pipeline {{ schedule = {schedule} }}
train {{
  seq = 128  global_batch = {24 * dp}  microbatch = 4  steps = 1  {options}
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = [python_stdlib] }}
}}
"""


def _check_fullest(text: str, folder: Path) -> None:
    module, program = compiled(text, folder)
    found = [it.peak.bytes for it in accounts(program)]
    assert found == pytest.approx(peaks(module, module.PLAN.global_batch), rel=0.03), accounts(
        program
    )
