"""What people read of a compiled plan: the emitted program and the IR, held word for word.

`pytest tests/emit/test_golden.py --update-golden` rewrites the files; read the difference as a reviewer would.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scalec.compiler.emit import emit
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.passes import compile_plan, lower
from scalec.compiler.proof import verify
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source

ROOT = Path(__file__).parents[2]
TINY = ROOT / "plans" / "tiny_llama.scale"
WHOLE = ("tiny_llama", "tiny_pipeline")
"""Plans as they are."""

SHARDS = {
    "one_rank": ("mesh { dp = 1  tp = 1 }", ""),
    "tensor_parallel": ("mesh { dp = 1  tp = 2 }  shard { batch over dp  vocab, heads, kv_heads, ffn over tp }", ""),
    "data_parallel": ("mesh { dp = 2  tp = 1 }  shard { batch over dp }", ""),
    "shared_state": ("mesh { dp = 2  tp = 1 }  shard { batch over dp }  state { zero 1 over dp }", "precision = bf16"),
    "zero_1": (
        "mesh { dp = 2  tp = 1 }  shard { batch over dp }  state { zero 1 over dp  bucket = 256KiB }",
        "precision = bf16",
    ),
    "zero_3": ("mesh { dp = 2  tp = 2 }  state { zero 3 over dp }", "precision = bf16  recompute = full"),
    "recomputed": ("mesh { dp = 2  tp = 2 }", "recompute = full"),
    "fused": ("mesh { dp = 2  tp = 2 }", "precision = bf16  kernels = triton  logits = chunk"),
    "compiled": ("mesh { dp = 2  tp = 2 }", "compile = on  recompute = full"),
    "few_kv_heads": ("mesh { dp = 2  tp = 4 }", "precision = bf16  gathered = regather"),
}
"""Variants of the tiny plan: its mesh (and shard, and state), and settings of `train`."""


VARIANTS = (*WHOLE, *SHARDS)


def source(variant: str) -> Source:
    """The tiny plan in one of its variants, or another plan."""
    if variant in WHOLE:
        return load(TINY.with_name(f"{variant}.scale"))
    mesh, train = SHARDS[variant]
    text = f'use "tiny_llama.scale" {{ train {{ {train} }} }}\n{mesh}\n'
    return Source(str(TINY.with_name(f"{variant}.scale")), text)


def files(plan: Source) -> dict[str, str]:
    """What `scalec compile` writes."""
    model = compile_plan(plan, "resolve")
    program = lower(model)
    return emit(program, plan, model, verify(program, model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_program_reads_as_it_did(variant: str, golden: Callable[[str, str], None]) -> None:
    plan = source(variant)
    golden(f"{variant}/train.py", files(plan)["train.py"])


NOT_BY_HAND = r"""
    ^import\ os$ | ^try: | \de-0\d | \b(peak|squares|squares_2|share|part)\s=[^=] | \b(z,\ t|y,\ y_\d)\ = | \bholders\b
    | \b(turns|shards|homes|carried|keeps_weights|keeps_gradients)= | split=\{\d:\ \("
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_that_no_person_writes_comes_back(variant: str) -> None:
    """But `y_2` of a fused product."""
    found = re.finditer(NOT_BY_HAND, files(source(variant))["train.py"], re.VERBOSE | re.MULTILINE)
    assert {match[0] for match in found} <= ({"y, y_2 ="} if variant == "fused" else set())


@pytest.mark.parametrize(
    ("variant", "stage"),
    [
        *(("tiny_llama", stage) for stage in ("resolve", "propagate", "insert_collectives", "fuse_buckets")),
        ("tiny_pipeline", "schedule_pipeline"),
        ("fused", "fuse_ops"),
    ],
)
def test_the_ir_reads_as_it_did(variant: str, stage: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{variant}/{stage}.ir", print_ir(compile_plan(source(variant), stage)))


def test_what_a_step_communicates_is_as_it_was(golden: Callable[[str, str], None]) -> None:
    plan = source("tiny_llama")
    golden("tiny_llama/plan.json", files(plan)["plan.json"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_plan_gives_the_same_bytes(variant: str) -> None:
    plan = source(variant)
    assert files(plan) == files(plan)


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_programs_are_formatted_and_lint_clean(command: list[str], tmp_path: Path) -> None:
    for path in [TINY, *(ROOT / "plans").glob("llama3_*.scale")]:
        plan = load(path)
        (tmp_path / f"{path.stem}.py").write_text(emit(compile_plan(plan), plan)["train.py"])
    for variant in VARIANTS:
        plan = source(variant)
        (tmp_path / f"{variant}.py").write_text(emit(compile_plan(plan), plan)["train.py"])
    ruff = [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
    result = subprocess.run(ruff, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
