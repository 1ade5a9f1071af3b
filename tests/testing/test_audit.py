"""The audit: every mistake that it knows is made, and found; and where the evaluator is broken, it
says so.

Purpose: the verdicts on plans of every kind of parallelism; one mutant of each family by name.
Non-goals: single errors and what the user is told of them (`test_proof`, `test_locate`).
"""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from helpers.plan_table import PLANS
from helpers.proof_pipelines import piped
from scalec.compiler.ir import Program
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import case_of
from scalec.compiler.proof.small_sizes import meshes
from scalec.compiler.proof.tensors import Array, Tensor
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower
from scalec.testing.audit import Audit, Bench, Fate, Verdict, audit
from scalec.testing.audit import evaluate as audited
from scalec.testing.audit.mutants import FAMILIES, Mutant, mutants

TINY = Path(__file__).parents[2] / "plans" / "tiny_llama.scale"

NAMES = (
    "one device",
    "data, tensor",
    "two key/value heads on four ranks",
    "regather",
    "tied embedding",
    "three axes",
    "one microbatch",
    "nested repeats, captured",
    "sequence alone",
    "captured matrix",
    "positions learned",
    "smoothing and z-loss",
    "documents",
    "documents, both ways",
    "layers that differ",
    "several results",
    "dropout",
    "dropout, nested repeats, documents",
    "recomputed",
    "shared optimizer state",
    "shared inside, copied outside",
    "layers gathered ahead",
    "shared parameters",
    "fp16",
    "fp16, shared, summed in fp16",
    "fused",
    "fused, smoothing, padding",
    "fused, vocabulary whole, tied, capped",
    "fused, head with a bias",
    "fused, head with a bias, vocabulary whole",
    "fused, logits of two losses",
    "fused, logits capped alone",
)

EXPECTED = {
    "coercion left out": ("all_reduce of g_vectors over dp x tp left out", Fate.VALUES),
    "left out with its conjugate": ("all_gather of a over tp and its conjugate", Fate.VALUES),
    "coercion done twice": ("all_reduce of loss.1 over dp done twice", Fate.VALUES),
    "coercion of another kind": ("all_reduce of label_logit over tp as a maximum", Fate.VALUES),
    "coercion over other axes": (
        "all_reduce of g_vectors over dp x tp done over dp instead",
        Fate.VALUES,
    ),
    "coercion along another dim": (
        "all_gather of a over tp along hidden instead of seq",
        Fate.SHAPES,
    ),
    "shards shifted by a rank": (
        "reduce_scatter of x over tp into shards shifted along tp",
        Fate.VALUES,
    ),
    "shards of two ranks exchanged": (
        "all_gather of m over tp of shards exchanged along tp",
        Fate.VALUES,
    ),
    "the last microbatch alone": ("only the last microbatch's d_head", Fate.VALUES),
    "divided by microbatches": ("loss divided by the number of microbatches", Fate.VALUES),
    "carry of a repeat lost": ("d_x.1 not carried", Fate.VALUES),
    "repeat in the wrong direction": ("repeat over layers run forward", Fate.VALUES),
    "slices of another layer": ("x.7 of another layer", Fate.VALUES),
    "recomputed with slices of another layer": (
        "v.1 recomputed with wv.3 of another layer",
        Fate.VALUES,
    ),
    "repeats exchanged": ("layers_0 and layers_1 exchanged in forward", Fate.VALUES),
    "wrong value saved for backward": ("d_q made of q.2 instead of _o.2", Fate.VALUES),
    "part of a gradient lost or doubled": ("d_x.1 lost from d_x.3", Fate.VALUES),
    "count of labels": ("update of wte by the rank's own count", Fate.VALUES),
    "steps that are skipped": ("update of norm1 without if_finite", Fate.VALUES),
    "divided by the ranks": ("inv_num_tokens divided by the ranks of dp", Fate.VALUES),
    "before the reduction": ("update takes g_vectors before its reduction", Fate.VALUES),
    "gradient norm": ("grad_norm_sq.2 added over tp in the norm", Fate.VALUES),
    "clipping": ("clipped by the norm of grad_norm_sq.1 alone", Fate.VALUES),
    "loss scale": ("update by gradients with their loss scale", Fate.VALUES),
    "another parameter's gradient": ("d_w_gate.2 and d_w_up.2 exchanged", Fate.VALUES),
    "another rank's gradient": ("g_matrices.1 of two ranks along tp exchanged", Fate.VALUES),
    "part taken for the first": (
        "embedding: every rank's part of vocab taken for the first",
        Fate.VALUES,
    ),
    "chunks taken for parts": ("rope of _y: chunks taken for parts", Fate.VALUES),
    "seen across documents": ("_o made across documents", Fate.VALUES),
    "documents of another rank": ("d_q made by the documents of another rank of dp", Fate.VALUES),
    "another dropout's draws": ("d_q made as another dropout is", Fate.VALUES),
    "another rank's draws": ("d_q made of the draws of another rank of dp", Fate.VALUES),
    "draws not drawn anew": ("all microbatches draw alike", Fate.VALUES),
    "weights of the step before": (
        "all_gather of w_layers_vectors.6 over dp not seen",
        Fate.VALUES,
    ),
    "weights of the next layer": ("w_layers_vectors.3 of the next layer", Fate.VALUES),
    "gradients of layers exchanged": ("layers of g_layers_vectors.4 exchanged", Fate.VALUES),
    "reduced in the layer and in the step": (
        "g_layers_vectors.5 reduced in the step too",
        Fate.VALUES,
    ),
    "left out in one layer": (
        "reduce_scatter of g_layers_vectors.1 over dp left out in one layer",
        Fate.VALUES,
    ),
    "copies of several stages counted twice": (
        "g_matrices.2 counted in the norm by all that hold it",
        Fate.VALUES,
    ),
    "summed over stages without a copy": (
        "g_matrices.1 summed over ranks that do not hold it",
        Fate.VALUES,
    ),
}
"""A mutant of each family in the tiny plan, and how it is found."""

STAGED = "in three stages"
SKIPPING = "spikes skipped"
ELSEWHERE = {
    "recomputed with slices of another layer": "recomputed",
    "repeats exchanged": "layers that differ",
    "seen across documents": "documents",
    "documents of another rank": "documents",
    "another dropout's draws": "dropout",
    "another rank's draws": "dropout",
    "loss scale": "fp16",
    "chunks taken for parts": "keys gathered",
    "draws not drawn anew": "dropout",
    **dict.fromkeys(
        (
            "weights of the step before",
            "weights of the next layer",
            "gradients of layers exchanged",
            "reduced in the layer and in the step",
            "left out in one layer",
        ),
        "shared parameters",
    ),
    "copies of several stages counted twice": STAGED,
    "summed over stages without a copy": STAGED,
}
"""Families of which the tiny plan has none, and a plan that has some."""

Rank = Callable[[Field, Tensor], Array]


@cache
def compiled(name: str) -> tuple[Program, Program]:
    """The program of a plan after the last pass, and its model."""
    text = {
        STAGED: piped("tied embedding", pp=3),
        SKIPPING: f"{PLANS['three axes'].text()} watch {{ skips = 1  spikes = skip(5) }}",
    }.get(name, PLANS[name].text() if name in PLANS else "")
    model = compile_plan(Source("tiny.scale", text) if name else load(TINY), "resolve")
    return lower(model), model


@cache
def benches(name: str) -> list[Bench]:
    """Where single mutants of a plan are evaluated."""
    program, model = compiled(name)
    return [
        Bench(case_of(program, model, axes), Field(4, len(program.axes)))
        for axes in meshes(program)
    ]


def survivors(found: Audit) -> list[str]:
    return [f"{v.fate.value}: {v.mutant.what}" for v in found.of(Fate.EQUIVALENT, Fate.MISSED)]


def only(family: str) -> Callable[[Program], list[Mutant]]:
    """The mutants of one family, to be asked for in place of all."""
    return lambda program: [mutant for mutant in mutants(program) if mutant.family == family]


def one_of_each_family(program: Program, number: int) -> list[Mutant]:
    """The mutant of each family with this number, counted around."""
    families: dict[str, list[Mutant]] = {}
    for mutant in mutants(program):
        families.setdefault(mutant.family, []).append(mutant)
    return [several[number % len(several)] for several in families.values()]


# ---- what is found


def test_steps_that_are_skipped_are_the_same_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "mutants", only("steps that are skipped"))
    found = audit(*compiled(SKIPPING))
    assert survivors(found) == []
    words = [verdict.mutant.what for verdict in found.verdicts]
    for gate in ("if_finite", "if_below"):
        assert f"update of wte without {gate}" in words
    assert "if_below by the rank's own loss.2" in words


def test_every_mutant_of_the_tiny_plan_is_killed() -> None:
    found = audit(*compiled(""))
    assert survivors(found) == []
    assert found.passed


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_mutant_is_killed(name: str) -> None:
    found = audit(*compiled(name))
    assert survivors(found) == []
    assert len(found.of(Fate.VALUES)) > 50


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_mutant_of_each_family_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one of a family in each plan."""
    monkeypatch.setattr(
        audited, "mutants", lambda program: one_of_each_family(program, NAMES.index(name))
    )
    found = audit(*compiled(name))
    assert survivors(found) == []
    assert len(found.of(Fate.VALUES)) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_mutant_that_is_expected_of_it(family: str) -> None:
    name, (what, fate) = ELSEWHERE.get(family, ""), EXPECTED[family]
    (mutant,) = [each for each in mutants(compiled(name)[0]) if each.what == what]
    fates = (bench.wrong(mutant) for bench in benches(name))
    assert (mutant.family, next(filter(None, fates), None)) == (family, fate)
    assert re.fullmatch(r"(llama|tiny)\.scale:\d+", mutant.line)


def test_mutants_are_all_different_and_differ_from_the_program() -> None:
    program, _ = compiled("")
    regions = [mutant.program.region for mutant in mutants(program)]
    assert program.region not in regions
    assert len(set(regions)) == len(regions)
    assert len({mutant.what for mutant in mutants(program)}) == len(regions)


def test_a_group_of_one_rank_has_no_mutants() -> None:
    assert not [
        m.what
        for m in mutants(compiled("axes of size 1")[0])
        if "coercion" in m.family or "rank" in m.family
    ]


# ---- what is said


def test_the_table_counts_each_family_and_names_what_was_not_killed() -> None:
    program, _ = compiled("")
    first, second, third = [
        Mutant("a family", what, "llama.scale:6", program) for what in ("one", "two", "three")
    ]
    fates = (Fate.SHAPES, Fate.EQUIVALENT, Fate.MISSED)
    found = Audit(
        tuple(
            Verdict(m, fate, {"dp": 2})
            for m, fate in zip((first, second, third), fates, strict=True)
        )
    )
    assert [*found.lines()] == [
        "mutants   made  by shapes  by values  equivalent  missed",
        "a family     3          1          0           1       1",
        "all          3          1          0           1       1",
        "1 killed of 3",
        "equivalent: two (llama.scale:6)",
        "missed: three (llama.scale:6)",
    ]
    assert not found.passed


# ---- evaluators that are broken


def test_an_evaluator_that_takes_all_numbers_for_equal_misses_mutants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audited, "mutants", only("divided by the ranks"))
    monkeypatch.setattr(Field, "unequal", lambda self, x, y: np.zeros(x.shape, bool))
    found = audit(*compiled(""))
    assert {v.fate for v in found.verdicts} == {Fate.MISSED}
    assert not found.passed


def test_an_order_in_which_zero_is_the_least_misses_a_maximum_of_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank: Rank = Field.rank

    def zero_least(self: Field, x: Tensor) -> Array:
        return np.where(x.array == 0, np.uint64(0), rank(self, x))

    monkeypatch.setattr(audited, "mutants", only("coercion of another kind"))
    monkeypatch.setattr(Field, "rank", zero_least)
    assert "missed: all_reduce of label_logit over tp as a maximum" in survivors(
        audit(*compiled(""))
    )


# ---- where it is


def test_it_is_imported_when_asked_for_and_needs_no_hypothesis() -> None:
    script = f"""
import sys
from scalec.compiler.cli import main
assert main(["verify", {str(TINY)!r}]) == 0
assert "scalec.testing" not in sys.modules, "a proof alone imports the audit"
sys.modules["hypothesis"] = None
import scalec.testing.audit
import scalec.testing
assert "torch" not in sys.modules
"""
    result = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
