"""Predictions above the best that others have published say so, with its source."""

from pathlib import Path

import pytest

from scalec.compiler.ir import Program
from scalec.compiler.reports.published import BEST, get_warning
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"


def program(name: str) -> Program:
    return compile_plan(load(PLANS / f"{name}.scale"))


def warning(name: str, mfu: float, tokens: float = 0.0, gpu: str = "h100_sxm") -> str:
    return "".join(get_warning(program(name), gpu, mfu, tokens))


@pytest.mark.parametrize(("name", "best"), [("llama3_8b", 0.471), ("llama3_70b", 0.393)])
def test_a_dense_model_is_compared_by_mfu_with_one_of_its_size_or_the_best(
    name: str, best: float
) -> None:
    assert warning(name, best) == ""
    told = warning(name, best + 0.01)
    assert told.startswith(
        f"MFU {best + 0.01:.1%} is above {best:.1%}, the best that is published ("
    )


@pytest.mark.parametrize(("name", "best"), [("qwen3_30b_a3b", 12_040), ("deepseek_v3", 1_002)])
def test_experts_are_compared_by_tokens_with_the_same_model(name: str, best: int) -> None:
    assert warning(name, 0.9, best) == ""
    assert warning(name, 0.0, 2 * best).startswith(
        f"{2 * best:,} tokens/s/GPU are above {best:,}, the best"
    )


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("mixtral_8x7b", "h100_sxm"), ("llama3_8b", "h200"), ("tiny_llama", "h100_sxm")],
)
def test_without_a_published_speed_of_its_class_nothing_is_said(name: str, gpu: str) -> None:
    """No model of Mixtral's size, no H200, no training in float32."""
    assert warning(name, 0.99, 1e9, gpu) == ""


def test_mfu_of_a_published_speed_follows_from_its_tokens() -> None:
    """70B: 6 operations for each parameter but the embedding's, and attention's of half the
    pairs, over 989e12.
    """
    (of_70b,) = [each for each in BEST if each.mfu and each.tokens]
    layers, hidden, seq, vocab = 80, 8192, 8192, 128_256
    for_parameters = 6 * (70.554e9 - vocab * hidden)
    for_attention = 6 * layers * hidden * seq
    assert of_70b.tokens * (for_parameters + for_attention) / 989e12 == pytest.approx(
        of_70b.mfu, abs=0.002
    )
