"""The encoder trains: masked tokens of a text that repeats itself become known, and on any mesh
by the same steps.
"""

from pathlib import Path
from types import ModuleType

import pytest

from helpers.forked_ranks import run_ranks
from helpers.programs import load_program
from scalec.runtime import Loader, Mesh
from scalec.runtime.data.mixture import Mixture, Part

PLANS = Path(__file__).parents[2] / "plans"
STEPS, MASK = 60, 32
MESHES = {"dp = 1  tp = 1": (1, STEPS), "dp = 2  tp = 2": (4, STEPS // 3)}
"""With so many ranks and steps: the first steps show whether they are the same."""


def test_masked_tokens_are_learned_alike_on_any_mesh(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(i * 3 % 32 for i in range(4000)))
    runs: list[list[float]] = []
    for mesh, (ranks, steps) in MESHES.items():
        module = _compiled(mesh, 16 // (2 if ranks > 1 else 1), tmp_path / str(ranks))
        losses = run_ranks(ranks, _trained, module, str(text), steps)
        assert all(each == losses[0] for each in losses)
        runs.append(losses[0])
    assert runs[1] == pytest.approx(runs[0][: len(runs[1])], rel=1e-8)
    *_, last, validation = runs[0]
    assert runs[0][0] > 3
    assert max(last, validation) < 1


def _compiled(mesh: str, microbatch: int, folder: Path) -> ModuleType:
    text = f"""use "models/distilbert.scale" {{
  dims {{ vocab = 33 pad 2  hidden = 32  heads = 4  ffn = 64  layers = 2 }}
}}
mesh  {{ {mesh} }}
shard {{ batch over dp  vocab, heads, ffn over tp  seq over tp }}
train {{
  seq = 16  global_batch = 16  microbatch = {microbatch}  steps = {STEPS}  precision = fp64
  optimizer adamw {{ lr = 1e-2 }}
  data text {{ files = ["unused"]  masked = 15%  mask_token = {MASK} }}
}}
"""
    return load_program(text, folder, str(PLANS / "tiny.scale"))


def _trained(module: ModuleType, file: str, steps: int) -> list[float]:
    """The loss of each step, and after a third of all steps that of other samples."""
    plan, mesh = module.PLAN, Mesh(module.PLAN.mesh)
    model, state = module.build(mesh)
    state.initialise(0)
    stream = plan.data.open_stream([str(file)], plan.seq)
    loader = Loader(
        Mixture([Part("", stream)]),
        plan.data,
        plan.inputs,
        mesh,
        plan.global_batch,
        plan.microbatches,
        plan.vocab,
        seed=0,
    )
    losses: list[float] = []
    for step in range(steps):
        losses.append(float(module.train_step(model, state, loader.batch(step), plan.lr).loss))
        if (step + 1) % (STEPS // 3) == 0:
            losses.append(float(module.eval_step(model, state, loader.batch(STEPS)).loss))
    return losses
