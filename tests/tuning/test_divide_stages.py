"""Layers are divided by seconds where the cluster's GPU is known, and no plan's step is slower
for it.
"""

from pathlib import Path

import pytest
from attrs import evolve

from helpers.programs import make_program
from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.stage_times import stage_times
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.ir import Pipeline, Program
from scalec.compiler.tuning.decisions import divide_stages

STAGES = str(Path(__file__).parents[2] / "plans" / "stages.scale")
LONG = """use "llama3_8b.scale" {{ train {{ seq = {seq}  recompute = {recompute} }} }}
mesh {{ pp = 8  dp = 2  tp = 8 }}
shard {{ batch over dp  vocab, heads, kv_heads, ffn over tp  seq over tp  layers over pp }}
pipeline {{ schedule = {schedule} }}
"""
TEXTS = [
    LONG.format(seq=32768, recompute="full", schedule="1f1b"),
    LONG.format(seq=32768, recompute="none", schedule="interleaved_1f1b(chunks=2)"),
    LONG.format(seq=2048, recompute="none", schedule="1f1b"),
    *(f'use "{name}.scale"\n' for name in ("deepseek_v3", "llama3_405b_long", "mixtral_8x7b")),
]


def _seconds(program: Program) -> float:
    on = hardware(program)
    assert on
    return step_time(program, on).seconds


def _by_operations(text: str, monkeypatch: pytest.MonkeyPatch) -> Program:
    with monkeypatch.context() as patched:
        patched.setattr(divide_stages, "_faster", lambda plan, pipeline, equal, gpu: equal)
        return make_program(text, path=STAGES)


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", TEXTS)
def test_no_step_is_slower_than_by_operations(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _seconds(make_program(text, path=STAGES)) <= _seconds(_by_operations(text, monkeypatch))


def test_a_step_of_long_sequences_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and what backward recomputes weigh more against the head than operations of
    forward say.
    """
    text = f"{TEXTS[0]}cluster {{ gpu = h100_pcie  gpus_per_node = 8  nodes = 16 }}\n"
    assert _layers(make_program(text, path=STAGES)) == (4,) * 8
    assert _layers(_by_operations(text, monkeypatch)) == (4, 4, 4, 4, 4, 4, 5, 3)
    assert _seconds(make_program(text, path=STAGES)) < 0.95 * _seconds(
        _by_operations(text, monkeypatch)
    )


def _layers(program: Program) -> tuple[int, ...]:
    assert program.pipeline
    return program.pipeline.layers


def test_layers_that_a_plan_gives_are_its_own() -> None:
    given = TEXTS[0].replace("1f1b", "1f1b  stages = [5, 4, 4, 4, 4, 4, 4, 3]")
    assert _layers(make_program(given, path=STAGES)) == (5, 4, 4, 4, 4, 4, 4, 3)


def test_messages_of_an_automatic_schedule_take_time() -> None:
    program = make_program(TEXTS[0], path=STAGES)
    pipeline, on = program.pipeline, hardware(program)
    assert pipeline
    assert on
    times = stage_times(program, _without_rows(pipeline), on)
    assert max(times.forward) == 1
    assert 0 < times.send < 1
    assert (
        stage_times(program, _without_rows(pipeline), evolve(on, network=on.network / 2)).send
        > times.send
    )


def _without_rows(pipeline: Pipeline) -> Pipeline:
    return evolve(pipeline, schedule=None)
