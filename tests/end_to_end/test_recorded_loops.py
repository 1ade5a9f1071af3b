"""Records of layers of repeats (`SCALEC_RECORD=1`) are the plan, call for call; no defect passes.

Gathers begin ahead of their layers and reductions in the last microbatch: these are held to where
they begin.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.oracle.plans import Case, plan_text
from helpers.oracle.recording import recorded
from helpers.programs import import_module, load_program, write_program
from scalec.runtime.train.same_state import SameState

LAYERS = 4
SMALL = "bucket = 4KiB"  # less than all layers have, so that each has a bucket
SHARED = Case(dp=2, tp=2, sp=True, microbatches=2, clip=1.0)
HYBRID = Case(replicas=2, dp=2, microbatches=2)
CASES = {
    "zero_0": replace(SHARED, state=f"zero 0 over dp  {SMALL}"),
    "zero_1": replace(SHARED, state=f"zero 1 over dp  {SMALL}"),
    "zero_1_hybrid": replace(HYBRID, state=f"zero 1 over dp  {SMALL}"),
    "zero_2": replace(SHARED, state="zero 2 over dp"),
    "zero_2_one_microbatch": Case(dp=2, state=f"zero 2 over dp  {SMALL}"),
    "zero_3": replace(SHARED, state="zero 3 over dp"),
    "zero_3_one_by_one": replace(SHARED, state=f"zero 3 over dp  prefetch = 0  {SMALL}"),
    "zero_3_far_ahead": replace(SHARED, state=f"zero 3 over dp  prefetch = 2  {SMALL}"),
    "zero_3_all_ahead": Case(
        dp=2, microbatches=2, precision="bf16", state="zero 3 over dp  prefetch = 9"
    ),
    "zero_3_recompute": replace(SHARED, recompute="full", state="zero 3 over dp"),
    "zero_3_regather": replace(SHARED, gathered="regather", state="zero 3 over dp"),
    "zero_3_hybrid": replace(HYBRID, state="zero 3 over dp  prefetch = 2"),
    "freed_and_reduced_once": replace(SHARED, state="parameters, optimizer over dp"),
    "a_group_of_its_own": Case(
        dp=2, microbatches=2, state='zero 3 over dp  group w { params = ["w*"]  zero 1 over dp }'
    ),
}

NESTED = """model nested(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  few = 8  ffn = 24  outer = 2  inner = 3 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat outer {
    x = x + rmsnorm(x, norm1[hidden], 1e-5) @ wo[hidden -> few] @ wp[few -> hidden]
    repeat inner {
      x = x + silu(rmsnorm(x, norm2[hidden], 1e-5) @ up[hidden -> ffn]) @ down[ffn -> hidden]
    }
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2 }
shard { batch over dp }
state { STATE }
train {
  seq = 8  global_batch = 8  microbatch = 2  steps = 10  precision = fp64  recompute = RECOMPUTE
  optimizer sgd { lr = 0.1 }
  data text { files = [python_stdlib] }
}
"""


def text(case: Case) -> str:
    """The plan of a case, of more layers."""
    return plan_text(case).replace("layers = 2", f"layers = {LAYERS}")


def is_equal(plan: str, folder: Path) -> None:
    """Asserts that a plan's program does what its account says, of which some is done in layers."""
    found = recorded(load_program(plan, folder), folder, "--steps 2")
    assert found.equal, found.lines()
    listed = json.loads((folder / "plan.json").read_text())["collectives"]
    assert any(it["bucket"] and it["loops"] for it in listed)
    assert found.calls == sum(it["count"] for it in listed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_the_record_is_the_plan(name: str, tmp_path: Path) -> None:
    is_equal(text(CASES[name]), tmp_path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("rules", "recompute"),
    [
        ("zero 0 over dp  bucket = 2KiB", "none"),
        ("zero 1 over dp  bucket = 2KiB", "full"),
        ("zero 2 over dp", "none"),
        ("zero 3 over dp  prefetch = 0", "none"),
        ("zero 3 over dp", "full"),
        ("zero 3 over dp  prefetch = 3", "none"),
    ],
)
def test_turns_in_turns(rules: str, recompute: str, tmp_path: Path) -> None:
    is_equal(NESTED.replace("STATE", rules).replace("RECOMPUTE", recompute), tmp_path)


# ---- a program that does not do what its plan says: (case, each line and what it becomes, what is
# found)

PLAIN = Case(dp=2, microbatches=2, state="zero 2 over dp")  # all of a layer's weights in one bucket
ONE_BY_ONE = replace(SHARED, state="zero 3 over dp  prefetch = 0")
EACH = 'unshard_ahead(dp, flat_params["layers"])'
OPTIMIZER = "    optimizer = "
ADDED = 'reduce_axes=("tp",),'
FREED = "x = reshard(x, params)"
DEFECTS: dict[str, tuple[Case, dict[str, str], str]] = {
    "a_turn_is_not_gathered": (PLAIN, {EACH: EACH.replace("])", "][1:])")}, "a call is missing"),
    "a_turn_is_gathered_twice": (
        PLAIN,
        {EACH: f"{EACH}; {EACH.replace('])', '][:1])')}"},
        "a call too many",
    ),
    "parts_are_not_added": (CASES["zero_3"], {ADDED: ""}, "a call is missing"),
    "another_axis": (CASES["zero_3"], {ADDED: ADDED.replace("tp", "dp")}, "another group"),
    "two_change_places": (
        CASES["zero_3"],
        {OPTIMIZER: f"    buckets = dict(reversed(buckets.items()))\n{OPTIMIZER}"},
        "another order",
    ),
    "not_gathered_again": (
        ONE_BY_ONE,
        {FREED: "pass"},
        "plan      all_gather of f64[480] over ranks 0, 2 in backward",
    ),
    "less_far_ahead": (CASES["zero_3_far_ahead"], {"prefetch=2": "prefetch=1"}, "another order"),
    "in_each_microbatch": (
        CASES["freed_and_reduced_once"],
        {
            "reshard_after_forward=True": "reshard_after_forward=True, shard_gradients=True",
        },
        "another op, reduction, shape\n    plan      all_gather of f64[480] over ranks 0, 2 in"
        " backward",
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_difference_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record alone: a run whose copies have come to differ would end before its first
    save.
    """
    monkeypatch.setattr(SameState, "require", lambda *_: None)
    case, changes, says = DEFECTS[name]
    path = write_program(text(case), tmp_path) / "train.py"
    program = path.read_text()
    assert all(line in program for line in changes)
    path.write_text(
        re.sub("|".join(map(re.escape, changes)), lambda found: changes[found[0]], program)
    )
    found = recorded(import_module(path), tmp_path, "--steps 1")
    assert not found.equal
    assert says in found.lines(), found.lines()
