"""The state as DTensors: torch.distributed.checkpoint saves it on one mesh and loads it on
another, bit for bit.
"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from helpers import torch_target
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.harness import Part
from helpers.oracle.plans import Case, plan_text
from scalec.codegen_templates import torch_ops
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import convert, saver
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.state.skips import LossScale
from scalec.tools.convert.checkpoint_names import checkpoint_names

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
            *pair,
            form == "safetensors",
            marks=[] if (name, form) in FEW else pytest.mark.long,
            id=f"{name}, {form}",
        )
        for name, pair in PAIRS.items()
        for form in ("safetensors", "own files")
    ],
)
def test_torch_takes_a_state_from_mesh_to_mesh(
    one: Case, other: Case, safetensors: bool, tmp_path: Path
) -> None:
    programs = [
        harness.load_case(case, tmp_path / name) for case, name in ((one, "one"), (other, "other"))
    ]
    saved, loaded = (
        harness.joined(
            run_ranks(case.ranks, each, program, tmp_path / "saved", safetensors, functional=True)
        )
        for case, program, each in zip((one, other), programs, (_save, _load), strict=True)
    )
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(value.view_as(loaded[key]), loaded[key]) for key, value in saved.items())


def _save(program: ModuleType, folder: Path, safetensors: bool) -> dict[str, Part]:
    state = _built(program)
    state.initialise(3)
    for box in state.boxes():
        if box.key.startswith("optimizer/"):
            box.tensor.copy_(
                torch.arange(box.tensor.numel()).view_as(box.tensor) % 7 + sum(box.offset)
            )
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


TORCH = Case(tp=2, sp=True, optimizer="adamw", clip=0.05, model="tied", padded=True)
LR = 0.01
WATCHED = {*saver.ADAPTED} - {*LossScale.KEYS}
"""What a program of torch alone does not keep."""


@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, optimizer="adamw", clip=0.05, state="zero 3 over dp"),
        pytest.param(replace(TORCH, optimizer="momentum"), marks=pytest.mark.long),
        pytest.param(replace(TORCH, optimizer="groups"), marks=pytest.mark.long),
        pytest.param(Case(pp=2, microbatches=2, optimizer="adamw"), marks=pytest.mark.long),
        pytest.param(
            Case(dp=2, tp=2, optimizer="adamw", state="zero 1 over dp"), marks=pytest.mark.long
        ),
        pytest.param(
            Case(pp=2, microbatches=2, optimizer="adamw", precision="fp16"), marks=pytest.mark.long
        ),
    ],
    ids=str,
)
def test_a_program_of_torch_alone_goes_on_from_a_checkpoint_and_a_run_after_it(
    case: Case, tmp_path: Path
) -> None:
    """What it loads and saves is the checkpoint's to the last bit; its next step is that of the
    runtime's program.
    """
    sharded = replace(case, dp=1, tp=2, pp=1, microbatches=case.rows // 2, state="")
    ours, plan = (
        harness.load_case(sharded, tmp_path / "ours"),
        compile_plan(Source("tiny.scale", plan_text(sharded))),
    )
    theirs = torch_target.load_torch_program(plan_text(case), tmp_path / "theirs")
    contents = convert.contents(checkpoint_names(plan, None))
    _, second = harness.batches(case, 2)
    parts = run_ranks(2, _step_and_save, ours, [*harness.batches(case, 2)], tmp_path / "run")
    convert.to_torch(Saved(tmp_path / "run" / "step-000001"), tmp_path / "torch", contents)
    run_ranks(case.ranks, _go_on, theirs, second, tmp_path, functional=True)
    back = {}
    for name, step in (("same", 1), ("next", 2)):
        convert.from_torch(
            convert.TorchFolder(tmp_path / name), tmp_path / f"step-{step:06d}", contents
        )
        back[name] = _values(tmp_path / f"step-{step:06d}")
    before = _values(tmp_path / "run" / "step-000001")
    before = {key: value for key, value in before.items() if key not in WATCHED}
    assert back["same"].keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in back["same"].items())
    rtol, atol = (2e-2, 2e-3) if case.precision == "fp16" else (1e-9, 1e-11)
    for key, value in harness.joined(parts).items():
        if key not in WATCHED:
            torch.testing.assert_close(back["next"][key], value, rtol=rtol, atol=atol)


def _step_and_save(program: ModuleType, batches: Any, folder: Path) -> dict[str, Part]:
    """A step, which is saved, and one more, whose state is returned."""
    model, state = program.build(Mesh(program.PLAN.mesh))
    state.initialise(3)
    for step, batch in enumerate(batches, start=1):
        program.train_step(model, state, harness.local_batch(program.PLAN, *batch), LR)
        if step == 1:
            saver.save(folder, step, state)
    return _parts(state)


def _go_on(program: ModuleType, batch: Any, folder: Path) -> None:
    """Loads and saves; and saves after one more step."""
    torch.set_deterministic_debug_mode("default")
    mesh = torch_target.mesh_of(program)
    model, optimizer = program.build(mesh)
    torch_ops.load_checkpoint(model, optimizer, str(folder / "torch"))
    torch_ops.save_checkpoint(model, optimizer, str(folder / "same"))
    program.train_step(model, optimizer, program.microbatches(mesh, *batch), LR)
    torch_ops.save_checkpoint(model, optimizer, str(folder / "next"))


def _values(path: Path) -> dict[str, torch.Tensor]:
    saved = Saved(path)
    return saved.whole([*saved.tensors()])


def _built(program: ModuleType) -> Any:
    torch.set_deterministic_debug_mode("default")
    return program.build(Mesh(program.PLAN.mesh))[1]


def _parts(state: Any) -> dict[str, Part]:
    return {box.key: Part(box.tensor.clone(), box.shape, box.offset) for box in state.boxes()}
