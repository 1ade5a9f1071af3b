"""The account against what emitted programs hold on gloo ranks, to the byte: what is kept for
backward, and state.

Attention on the CPU is torch's flash kernel, or, with a cap or dropout, what scalec's runtime does
in its place.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.measured_memory import AGAIN, measure
from helpers.memory_plans import PLANS, compiled, texts
from scalec.compiler.analysis.expert_loads import with_load
from scalec.compiler.analysis.memory import Account
from scalec.compiler.analysis.memory.account import accounts_of
from scalec.compiler.ir import SEQUENCE, walk
from scalec.compiler.ops import OPS
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

TEXTS = dict(texts())
SLICES = {"fused, every op, fp32", "fused, every op, bf16"}
"""Where several ops keep a slice each of one product, of which the first keeps all."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TEXTS)
def test_the_account_is_what_is_held(name: str, tmp_path: Path) -> None:
    module, program = compiled(TEXTS[name], tmp_path)
    (it,), ranks = accounts_of(with_load(program, 1)), measure(module, module.PLAN.global_batch)
    kinds = {kind for rank in ranks for kind in rank.kept}
    if AGAIN not in kinds and any(
        claim.dim == SEQUENCE and claim.axis == "cp" for claim in program.claims
    ):
        # masks are of different sizes; the account is the largest
        assert {kind: max(rank.kept.get(kind, 0) for rank in ranks) for kind in kinds} == _by_kind(
            it
        )
        ranks = [replace(rank, kept=_by_kind(it)) for rank in ranks]
    for rank in ranks:
        apart = AGAIN not in rank.kept and name not in SLICES
        assert rank.kept == _by_kind(it) if apart else sum(rank.kept.values()) == it.activations
        assert (rank.state, rank.tables, rank.inputs) == (it.state, it.tables, it.inputs)


def _by_kind(it: Account) -> dict[str, int]:
    found: Counter[str] = Counter()
    for kept in it.kept:
        found[kept.op.kind] += kept.total
    return dict(found)


def test_every_op_that_has_a_gradient_is_among_them() -> None:
    """But for a user's own: what it keeps is its author's, and the account counts its operands."""
    programs = (compile_plan(Source(str(PLANS / "tiny.scale"), text)) for text in TEXTS.values())
    kinds = {op.kind for program in programs for op in walk(program.forward.body)}
    assert {kind for kind, entry in OPS.items() if entry.differentiable} - kinds == {"call"}
