"""A model's hash is that of what it computes: on any mesh, in any precision, and no other
model's.
"""

import re

import pytest

from helpers.oracle.plans import Case, plan_text
from scalec.compiler.emit.plan_json import get_model_hash, get_unpadded_hash
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLAN = plan_text(Case())


def known(text: str) -> str:
    """The hash of a plan's model."""
    found = get_model_hash(compile_plan(Source("tiny.scale", text), "resolve"))
    assert re.fullmatch(r"[0-9a-f]{12}", found)
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, tp=2, sp=True, vocab=False),
        Case(microbatches=2),
        Case(pp=2),
        Case(dp=2, state="zero 3 over dp"),
        Case(precision="bf16"),
        Case(kernels="triton"),
        Case(optimizer="groups", clip=1.0),
        Case(gathered="regather"),
    ],
    ids=str,
)
def test_it_is_one_model(case: Case) -> None:
    assert known(plan_text(case)) == known(PLAN)
    assert known(f"# moved by a line\n{PLAN}") == known(PLAN)


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("theta = 1", "theta = 2"),
        ("heads = 4 ", "heads = 2 "),
        ("silu(m", "relu(m"),
        ("mask=causal", "mask=causal, window=4"),
        ("labels)", "labels, smoothing=0.1)"),
    ],
)
def test_it_is_another(was: str, now: str) -> None:
    assert was in PLAN
    assert known(PLAN.replace(was, now)) != known(PLAN)


def test_a_word_about_what_losses_see_makes_no_other_model() -> None:
    word, other = (
        PLAN.replace("]) {", "]) bidirectional {", 1),
        PLAN.replace("theta = 1", "theta = 2"),
    )
    assert known(word) == known(PLAN)
    assert known(other.replace("]) {", "]) bidirectional {", 1)) == known(other) != known(word)


@pytest.mark.parametrize("pad", ["pad 4", "pad 16"])
def test_without_padding_it_is_that_of_the_plan_without(pad: str) -> None:
    padded = PLAN.replace("vocab = 32", f"vocab = 29 {pad}")
    plain = PLAN.replace("vocab = 32", "vocab = 29").replace(" vocab, heads", " heads")
    model = compile_plan(Source("tiny.scale", padded), "resolve")
    assert get_unpadded_hash(model) == known(plain)
    assert get_unpadded_hash(model) != known(padded)
    assert get_unpadded_hash(compile_plan(Source("tiny.scale", plain), "resolve")) == ""


def test_of_a_program_with_placements_there_is_none() -> None:
    assert get_model_hash(compile_plan(Source("tiny.scale", PLAN))) == ""
