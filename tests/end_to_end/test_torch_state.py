"""The state as DTensors: torch.distributed.checkpoint saves it on one mesh and loads it on another, bit for bit."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.harness import Part
from helpers.oracle.plans import Case
from scalec.runtime import Mesh

dcp: Any = checkpoint  # its types are partial
PIPELINE: dict[str, Any] = {
    "model": "biased softmax",
    "layers": 4,
    "optimizer": "groups",
    "microbatches": 2,
    "precision": "fp16",
}
DENSE: dict[str, Any] = {"model": "tied", "padded": True, "optimizer": "adamw", "vocab": True}
PAIRS = {
    "experts, stages": (
        Case(pp=2, dp=2, experts="dp", schedule="zbv", state="zero 1 over dp", **PIPELINE),
        Case(dp=2, experts="dp", state="zero 3 over dp", **PIPELINE),
    ),
    "ZeRO 3, padded": (Case(dp=2, tp=2, state="zero 3 over dp", **DENSE), Case(tp=2, **DENSE)),
    "stages, tied": (
        Case(pp=2, optimizer="momentum", model="tied", microbatches=2),
        Case(optimizer="momentum", model="tied"),
    ),
}
FEW = (("experts, stages", "safetensors"), ("ZeRO 3, padded", "own files"))


@pytest.mark.parametrize(
    ("one", "other", "safetensors"),
    [
        pytest.param(
            *pair, form == "safetensors", marks=[] if (name, form) in FEW else pytest.mark.long, id=f"{name}, {form}"
        )
        for name, pair in PAIRS.items()
        for form in ("safetensors", "own files")
    ],
)
def test_torch_takes_a_state_from_mesh_to_mesh(one: Case, other: Case, safetensors: bool, tmp_path: Path) -> None:
    programs = [harness.compiled(case, tmp_path / name) for case, name in ((one, "one"), (other, "other"))]
    saved, loaded = (
        harness.joined(run_ranks(case.ranks, each, program, tmp_path / "saved", safetensors, functional=True))
        for case, program, each in zip((one, other), programs, (_save, _load), strict=True)
    )
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(value.view_as(loaded[key]), loaded[key]) for key, value in saved.items())


def _save(program: ModuleType, folder: Path, safetensors: bool) -> dict[str, Part]:
    state = _built(program)
    state.initialise(3)
    for box in state.boxes():
        if box.key.startswith("optimizer/"):
            box.tensor.copy_(torch.arange(box.tensor.numel()).view_as(box.tensor) % 7 + sum(box.offset))
    _whole(state)
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True) if safetensors else None
    dcp.save({"state": state}, checkpoint_id=None if safetensors else folder, storage_writer=writer)
    return _parts(state)


def _whole(state: Any) -> None:
    """What several ranks hold is of rank 0."""
    for key in ("optimizer/step", "optimizer/loss_scale"):
        if key in (kept := harness.kept(state)):
            kept[key].fill_(8)


def _load(program: ModuleType, folder: Path, safetensors: bool) -> dict[str, Part]:
    state = _built(program)
    reader = HuggingFaceStorageReader(str(folder)) if safetensors else None
    dcp.load({"state": state}, checkpoint_id=None if safetensors else folder, storage_reader=reader)
    return _parts(state)


def _built(program: ModuleType) -> Any:
    torch.set_deterministic_debug_mode("default")
    return program.build(Mesh(program.PLAN.mesh))[1]


def _parts(state: Any) -> dict[str, Part]:
    return {box.key: Part(box.tensor.clone(), box.shape, box.offset) for box in state.boxes()}
