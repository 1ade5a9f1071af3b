"""`--init` on every kind of state: the first step is that of transformers, and what files and plan
lack is told.

Non-goals: which models there are (`test_same_numbers`).
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers import hf_models, launched
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.programs import load_program
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import export, saver
from scalec.runtime.checkpoint.hf_weights import Reader

LR = 0.1
# how state is shared out → the model, the mesh, its data-parallel degree and its ranks, further
# sections
KINDS = {
    # padded, tied, one tensor for q, k, v
    "zero_1": ("gpt2", "dp = 2  tp = 2", 2, 4, "state { zero 1 over dp }"),
    "zero_2": ("llama", "dp = 2  tp = 1", 2, 2, "state { zero 2 over dp }"),
    "zero_3": ("qwen3", "dp = 2  tp = 2", 2, 4, "state { zero 3 over dp }"),
    "optimizer_over": ("gpt2", "dp = 2  tp = 1", 2, 2, "state { optimizer over dp }"),
    # positions are learned
    "ring": ("gpt2", "dp = 1  cp = 2  tp = 2", 1, 4, "state { zero 3 over cp }"),
    # tied over stages
    "pipeline": ("gpt2", "pp = 2  dp = 1  tp = 1", 1, 2, "pipeline { schedule = 1f1b }"),
    "pipeline_shared": (
        "llama_tied",
        "pp = 2  dp = 2  tp = 1",
        2,
        4,
        "pipeline { schedule = 1f1b }  state { zero 3 over dp }",
    ),
    "experts": ("qwen3_moe", "dp = 2  tp = 2", 2, 4, "state { zero 3 over dp }"),
    "experts_over_ring": ("olmoe", "dp = 2  cp = 2  tp = 1", 2, 4, "state { zero 2 over dp, cp }"),
    "dense_first": (
        "deepseek_v3",
        "pp = 2  dp = 2  tp = 1",
        2,
        4,
        "pipeline { schedule = 1f1b }  state { zero 1 over dp }",
    ),
    "experts_pipeline": ("mixtral", "pp = 2  dp = 2  tp = 1", 2, 4, "pipeline { schedule = 1f1b }"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    name, mesh, dp, ranks, sections = KINDS[kind]
    model = hf_models.model(name, torch.float64)
    model.save_pretrained(tmp_path / "in")
    module = _compiled(tmp_path, mesh, dp, sections)
    _check_first_step(model, module, ranks, tmp_path)


def test_of_more_positions_than_the_plan_has_the_first_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are absolute: what comes later in the file has no part in shorter sequences."""
    configured = hf_models.CONFIGS["gpt2"]()
    configured.n_positions = hf_models.SEQ + 8
    monkeypatch.setitem(hf_models.CONFIGS, "gpt2", lambda: configured)
    model = hf_models.model("gpt2", torch.float64)
    model.save_pretrained(tmp_path / "in")
    module = _compiled(tmp_path, "dp = 1  tp = 2", 1, "")
    begun = f"{tmp_path / 'in'}: the first 16 of 24 positions of `transformer.wpe.weight`"
    assert str(Reader(tmp_path / "in", module.PLAN.names)) == begun
    _check_first_step(model, module, 2, tmp_path)


def _compiled(folder: Path, mesh: str, dp: int, sections: str) -> ModuleType:
    """The program that is imported for the model in `folder`/in."""
    text = hf_models.plan(folder / "in", mesh, dp) + sections
    text = text.replace("shard {", "shard { layers over pp") if "pp" in mesh else text
    return load_program(text, folder / "program")


def _check_first_step(model: Any, module: ModuleType, ranks: int, folder: Path) -> None:
    """Its loss, and all of its gradients by what they change, as files have them."""
    loss, gradients = hf_models.loss_and_gradients(model, *hf_models.batch())
    assert run_ranks(ranks, _step, module, folder) == [pytest.approx(loss, rel=1e-9)] * ranks
    export.export(folder / "step-000001", folder / "out", module.PLAN.names)
    before, after = (load_file(folder / each / "model.safetensors") for each in ("in", "out"))
    assert before.keys() == after.keys() == gradients.keys()
    for tensor in [
        name for name in gradients if name.endswith("score_correction_bias")
    ]:  # moved by `rate`, or not at all
        moved = (after[tensor].double() - before[tensor]).abs() / 0.001
        assert torch.allclose(moved, moved.round(), atol=1e-3)
        assert {*moved.round().tolist()} <= {0, 1}
        del gradients[tensor]
    for tensor, gradient in gradients.items():
        wanted = (before[tensor] - LR * gradient)[
            : hf_models.SEQ if tensor.endswith("wpe.weight") else None
        ]
        assert after[tensor].shape == wanted.shape, tensor
        assert torch.allclose(after[tensor], wanted, rtol=1e-9, atol=1e-12), tensor


def _step(module: ModuleType, folder: Path) -> float:
    """The first loss; what it leaves is saved."""
    model, state = module.build(Mesh(module.PLAN.mesh))
    Reader(folder / "in", module.PLAN.names).fill(state)
    metrics = module.train_step(
        model, state, harness.local_batch(module.PLAN, *hf_models.batch()), LR
    )
    saver.save(folder, 1, state)
    return metrics.loss.item()


WRONG: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda tensors: None, ""),
    (
        lambda tensors: [
            tensors.pop(f"model.layers.1.mlp.{name}_proj.weight") for name in ("up", "down")
        ],
        "{path} has no `model.layers.1.mlp.up_proj.weight`, `model.layers.1.mlp.down_proj.weight`,"
        " which the plan needs for `layers.1.w_up`, `layers.1.w_down`",
    ),
    (
        lambda tensors: [tensors.update({f"model.layers.{i}.b": torch.ones(1)}) for i in range(5)],
        "{path}: the plan does not use `model.layers.0.b`, `model.layers.1.b`,"
        " `model.layers.2.b` and 2 more",
    ),
]


def test_a_pipeline_says_once_what_files_and_plan_lack(tmp_path: Path) -> None:
    """Each of its ranks reads half of the layers; the missing ones are of the second stage."""
    hf_models.model("llama", torch.float64).save_pretrained(tmp_path / "in")
    module = _compiled(
        tmp_path,
        "pp = 2  dp = 1  tp = 1",
        1,
        "pipeline { schedule = 1f1b }  state { zero 1 over dp }",
    )
    launched.text_files(tmp_path)
    path = tmp_path / "in" / "model.safetensors"
    tensors = load_file(path)
    for change, line in WRONG:
        changed = dict(tensors)
        change(changed)
        save_file(changed, path)
        options = f"--data text/*.txt --steps 1 --init {path}"
        program = (module.PLAN, module.build, module.train_step, module.eval_step)
        error = f"error: {line.format(path=path)}\n" if line else ""
        status = 2 if line else 0
        assert launched.run_recorded(tmp_path, *program, options, record="") == [
            (status, error),
            (status, ""),
        ]
