"""Latent attention (DeepSeek-V2): heads that share a rotated part of keys, values of another
size than keys.
"""

import pytest

from helpers.oracle.plans import Case, plan_text
from helpers.programs import get_train_py, make_program
from scalec.compiler.analysis.communication import collectives
from scalec.compiler.analysis.flops import cost
from scalec.compiler.emit.readback import check
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

SP = Case(tp=2, sp=True, model="latent")
CASES = (
    SP,
    Case(cp=2, tp=2, how="as zigzag", kernels="triton", model="latent"),
    Case(dp=2, cp=2, how="as zigzag via ring", recompute="full", model="latent"),
    Case(uly=4, kv=2, model="latent"),
    Case(tp=4, kv=1, model="latent"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_is_that_of_one_device(case: Case) -> None:
    text = plan_text(case)
    verify(make_program(text), make_program(text, "resolve"))


LINES = (
    "q = concat(q, rope(qp, rotary))",
    "k = concat(k, x2.unsqueeze(2))",
    "c, kp = split(linear(a, self.wkv_a), KV_RANK, PE)",
)


@pytest.mark.parametrize("line", LINES)
def test_lines_read_as_a_person_would_write_them(line: str) -> None:
    assert f" {line}  # [" in get_train_py(plan_text(SP))[0]


WRONG = (
    ("concat(k, x2.unsqueeze(2))", "concat(k, x2.unsqueeze(1))"),
    ("concat(k, x2.unsqueeze(2))", "concat(k, x2.unsqueeze(3))"),
    ("concat(k, x2.unsqueeze(2))", "concat(k, x2)"),
    ("concat(k, x2.unsqueeze(2))", "concat(x2.unsqueeze(2), k)"),
    ("concat(q, rope(qp, rotary))", "concat(q, qp)"),
    ("rope(qp, rotary)", "rope(qp, rotary_2)"),
    ("split(linear(a, self.wkv_a), KV_RANK, PE)", "split(linear(a, self.wkv_a), PE, KV_RANK)"),
)


@pytest.mark.parametrize(("right", "wrong"), WRONG, ids=[wrong for _, wrong in WRONG])
def test_the_read_back_refuses_anything_else(right: str, wrong: str) -> None:
    text, program = get_train_py(plan_text(SP))
    assert right in text
    with pytest.raises(AssertionError):
        check(text.replace(right, wrong), program)


def test_under_sequence_parallelism_what_is_narrow_is_gathered() -> None:
    """The latents of queries and keys, and the rotated part of keys, in place of the stream."""
    found = {
        each.shape[-1]
        for each in collectives(get_train_py(plan_text(SP))[1])
        if each.where == "forward"
    }
    config = SP.config
    gathered = {config.q_rank, config.kv_rank, config.pe}
    assert found >= gathered
    assert config.hidden in found, "the other norm's, for the vocabulary and the MLP"


def test_products_are_counted_by_the_sizes_of_keys_and_values() -> None:
    _, program = get_train_py(plan_text(Case(model="latent")))
    op = next(op for op in program.ops if op.kind == "attention")
    rows, pairs = 2 * 4, 8 * 9 // 2
    assert cost(program, [op]).forward == 2 * (6 + 3) * rows * pairs


MISTAKES = {
    "attention(q, k, v,": (
        "attention(q, v, k,",
        "the same dims but for the heads and the last of values",
    ),
    "split(a @ wkv_a[hidden -> kv_a], [kv_rank, pe])": (
        "split(a @ wkv_a[hidden -> kv_a], [pe, nope])",
        "kv_a is 7",
    ),
    "concat(k, rope(kp, theta), as=qk)": ("concat(k, k, as=qk)", "qk is 6"),
}


@pytest.mark.parametrize("right", MISTAKES)
def test_mistakes_are_told(right: str) -> None:
    wrong, words = MISTAKES[right]
    text = plan_text(Case(model="latent"))
    assert right in text
    with pytest.raises(PlanError, match=words):
        compile_plan(Source("plan.scale", text.replace(right, wrong)))
