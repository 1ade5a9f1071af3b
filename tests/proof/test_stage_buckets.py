"""Buckets that move around a pipeline's stages, action by action: too early or too late, it is
found.

Non-goals: rows (`test_rows`).
"""

from functools import cache

import pytest

from helpers.proof_pipelines import compiled, of_model
from scalec.compiler.analysis.stage_buckets import chunks
from scalec.compiler.proof.prime_field import Field
from scalec.compiler.proof.proof import case_of
from scalec.compiler.proof.small_sizes import meshes
from scalec.testing.audit import Bench, Fate
from scalec.testing.audit.mutants import chunk_mutants
from scalec.testing.audit.mutants.chunks import AWAITED, BEGUN, CHUNKS, FREED

SCHEDULES = ("1f1b", "interleaved_1f1b(chunks=2)", "zb_h1", "zbv")
DIMS = "vocab = 32  hidden = 16  heads = 4  kv_heads = 2  head_dim = 4  ffn = 12  layers = 4"
FATES = {AWAITED: {Fate.SHAPES}, BEGUN: {Fate.VALUES}, FREED: {Fate.SHAPES}}


def _plan(schedule: str, state: str = "zero 3 over dp", model: str = "llama") -> str:
    text = of_model(model, DIMS, "vocab, heads, kv_heads, ffn", "layers", schedule, 2)
    return text.replace("zero 1 over dp", state)


@cache
def _bench(schedule: str, mesh: int) -> Bench:
    program, model = compiled(_plan(schedule))
    return Bench(case_of(program, model, meshes(program)[mesh]), Field(4, 3))


@pytest.mark.sample(4)
@pytest.mark.parametrize("mesh", [0, 1], ids=["pp 2", "pp 3"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_moves_too_early_or_too_late_is_found(schedule: str, mesh: int) -> None:
    on = _bench(schedule, mesh)
    made = [*chunk_mutants(on.case.program)]
    fates = {
        family: {on.runs(mutant) for mutant in made if mutant.family == family} for family in CHUNKS
    }
    assert fates == FATES
    assert len(made) == len(CHUNKS) * sum(map(len, chunks(on.case.program)))
