"""Compiles plans for torch alone, and runs such programs on forked gloo ranks as
`oracle.harness` runs the others.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from helpers.forked_ranks import run_ranks
from helpers.oracle.harness import Inputs
from helpers.oracle.reference import Step, Tensors
from helpers.programs import import_module, write_files
from scalec.codegen_templates.torch_ops import distribute
from scalec.compiler.emit.dtensor import emit, for_torch
from scalec.compiler.frontend import resolve
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower


def text_of(plan: str, path: str = "tiny.scale") -> str:
    """The program of a plan, which is read as if it lay at `path`.  Raises PlanError."""
    return files_of(plan, path)["train.py"]


def files_of(plan: str, path: str = "tiny.scale") -> dict[str, str]:
    """The program of such a plan, and the files that it reads, by name."""
    source = Source(path, plan)
    return emit(lower(for_torch(resolve(source))), source)


def of_file(plan: Path, folder: Path) -> ModuleType:
    """The program of a plan's file, with what lies beside it, written to `folder` and imported."""
    source = load(plan)
    return _load(emit(lower(for_torch(resolve(source))), source), folder)


def load_torch_program(plan: str, folder: Path, at: str = "tiny.scale") -> ModuleType:
    """The program of a plan, written to `folder` and imported."""
    return _load(files_of(plan, at), folder)


def _load(files: dict[str, str], folder: Path) -> ModuleType:
    """Programs import the library that lies beside them."""
    write_files(files, folder)
    sys.path.insert(0, str(folder))
    try:
        return import_module(folder / "train.py")
    finally:
        sys.path.remove(str(folder))


def run(
    ranks: int,
    module: ModuleType,
    start: Tensors,
    batches: Sequence[Inputs],
    lr: float,
    is_read: bool = True,
) -> list[Step]:
    """Trains a program from `start` on global batches, [rows, seq] each; its steps, put together of
    all ranks'.

    Torch compares each message of stages with what the plan says of it, where each stage reads all
    that it receives.
    """
    found = run_ranks(ranks, _train, module, start, batches, lr, is_read)
    return [_joined(each, start) for each in zip(*found, strict=True)]


def _joined(steps: Sequence[Step], start: Tensors) -> Step:
    """One step: ranks hold all parameters, or those of their stages."""
    first = steps[0]
    assert {(it.loss, it.norm) for it in steps} == {(first.loss, first.norm)}, "metrics differ"
    gradients: dict[str, Tensor] = {}
    parameters: dict[str, Tensor] = {}
    for it in steps:
        assert all(
            torch.equal(it.parameters[name], parameters[name])
            for name in it.parameters.keys() & parameters
        )
        gradients |= it.gradients
        parameters |= it.parameters
    assert gradients.keys() == parameters.keys() == start.keys()
    return Step(first.loss, first.norm, gradients, parameters)


def initial(module: ModuleType) -> Tensors:
    """The parameters that a program begins with, whole."""
    return whole(module.build(mesh_of(module))[0])


def whole(model: Any) -> Tensors:
    """A copy of its parameters, whole."""
    return {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}


def mesh_of(module: ModuleType) -> Any:
    """The program's mesh, on CPUs."""
    return init_device_mesh("cpu", tuple(module.MESH.values()), mesh_dim_names=tuple(module.MESH))


def _train(
    module: ModuleType, start: Tensors, batches: Sequence[Inputs], lr: float, is_read: bool
) -> list[Step]:
    # torch's own optimizers and DTensors sum as they like
    torch.set_deterministic_debug_mode("default")
    mesh = mesh_of(module)
    model, optimizer = module.build(mesh)
    for stage in model.schedule._stages if hasattr(model, "schedule") else ():
        stage._runtime_validate = is_read
    fill(model, start)
    return [
        _step(module, model, optimizer, module.microbatches(mesh, *batch), lr, start)
        for batch in batches
    ]


def fill(model: torch.nn.Module, start: Tensors) -> None:
    """Each parameter's part of global values, whose layers lie one after the other."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            value: Any = param.data
            value.copy_(
                distribute(start[name].view(value.shape), value.device_mesh, value.placements)
            )


def _step(
    module: ModuleType, model: torch.nn.Module, optimizer: Any, batch: Any, lr: float, like: Tensors
) -> Step:
    """One step; its reduced gradients are copied before they are scaled."""
    gradients: dict[str, Tensor] = {}

    def reduced(*of: torch.nn.Module) -> list[Any]:
        found = plain(*of)
        names = [name for name, _ in model.named_parameters()]
        gradients.update(zip(names, (each.full_tensor().clone() for each in found), strict=True))
        return found

    owner, name = (
        (model, "gradients") if hasattr(model, "gradients") else (module, "reduced_gradients")
    )
    plain: Any = getattr(owner, name)
    setattr(owner, name, reduced)
    metrics = module.train_step(model, optimizer, batch, lr)
    setattr(owner, name, plain)
    kept: Any = dict(model.named_parameters())
    parameters = {name: param.full_tensor().clone() for name, param in kept.items()}
    return Step(
        float(metrics.loss), float(metrics.norm), _like(gradients, like), _like(parameters, like)
    )


def _like(values: Tensors, like: Tensors) -> Tensors:
    return {name: x.view_as(like[name]) for name, x in values.items()}
