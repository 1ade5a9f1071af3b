"""The parts of a step that is of torch alone: sums over ranks, gradients, groups of parameters (`torch_ops`)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from .torch_ops import wide


def count_valid(labels: Sequence[Tensor]) -> int:
    """The number of labels ≥ 0 on all ranks: one all_reduce."""
    return int(whole_sum([(each >= 0).sum() for each in labels]))


def whole_sum(terms: Sequence[Tensor]) -> Tensor:
    """The sum of DTensors of the same placements, whole on each rank."""
    return cast(DTensor, reduce(torch.add, terms)).full_tensor()


def sum_gradients(module: nn.Module) -> None:
    """Has FSDP2 add up gradients over ranks: a step divides them by its labels, not by its ranks."""
    sharded = cast(FSDPModule, module)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(enable=True)  # else one that gloo does not have


def each_module(modules: Iterable[nn.Module], reduce_now: bool, free: bool) -> None:
    """Says of modules whether the next backward reduces their gradients, and frees their gathered parameters."""
    for module in modules:
        module = cast(FSDPModule, module)
        module.set_requires_gradient_sync(reduce_now, recurse=False)
        module.set_reshard_after_backward(free, recurse=False)


def param_group(model: nn.Module, *patterns: str, weight_decay: float, lr_scale: float = 1.0) -> dict[str, Any]:
    """The parameters whose names fit a pattern, with the settings that they share."""
    fits = re.compile("|".join(each.replace(".", r"\.").replace("*", r"\d+") for each in patterns))
    params = [param for name, param in model.named_parameters() if fits.fullmatch(name)]
    return {"params": params, "weight_decay": weight_decay, "lr_scale": lr_scale}


def reduced_gradients(model: nn.Module, dtype: torch.dtype | None = None) -> list[DTensor]:
    """All gradients, after the sums over ranks that they still are: P→I in `dtype`, an all_reduce for each."""
    for parameter in model.parameters():
        gradient, placements = cast(DTensor, parameter.grad), cast(DTensor, parameter.data).placements
        if gradient.placements != placements:
            sent = cast(DTensor, gradient.to(dtype or gradient.dtype))
            parameter.grad = sent.redistribute(placements=placements).to(gradient.dtype)
    return [cast(DTensor, parameter.grad) for parameter in model.parameters()]


def total_norm(gradients: Sequence[DTensor]) -> Tensor:
    """The norm of all gradients: one sum over ranks for those of the same placements."""
    alike: dict[tuple[Placement, ...], list[Tensor]] = {}
    for each in gradients:
        alike.setdefault(tuple(each.placements), []).append(each.to(wide(each)).square().sum())
    return torch.stack([whole_sum(each) for each in alike.values()]).sum().sqrt()


def by_file_names(model: nn.Module, names: Mapping[str, str]) -> dict[str, Any]:
    """A model's parameters by the names that files have for them."""
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        layer = re.search(r"\.(\d+)\.", name)
        tensor = names[re.sub(r"\.\d+\.", ".*.", name)]
        found[tensor.format(i=layer[1]) if layer else tensor] = value
    return found


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters by name, and the tensors of the optimizer's state, which is made if there is none: to save or fill."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    kept = get_optimizer_state_dict(model, optimizer, options=options)
    state = {f"optimizer.{key}": value for key, value in kept.items() if isinstance(value, Tensor)}
    return {**get_model_state_dict(model), **state}


def scaled_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`training_state`, and the loss scale of fp16 with the steps since it changed."""
    scale, steps = scale_and_steps(optimizer)
    own = {"optimizer/loss_scale": scale, "optimizer/loss_scale_steps": steps}
    return {**training_state(model, optimizer), **own}


def scale_and_steps(optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """The loss scale, which keeps gradients that are small in fp16, and the steps since it changed; on the CPU."""
    return optimizer.param_groups[0].setdefault("loss_scale", (torch.tensor(2.0**16), torch.tensor(0.0)))


def loss_scale(optimizer: torch.optim.Optimizer) -> float:
    """The factor of this step's loss."""
    return scale_and_steps(optimizer)[0].item()


def adapt_loss_scale(optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """As `torch.amp.GradScaler`: halves it after an overflow, doubles it after 2,000 steps without one, up to 2²⁴."""
    scale, steps = scale_and_steps(optimizer)
    steps += 1
    factor = 0.5 if not norm.isfinite() else 2.0 if steps == 2000 else 1.0
    scale.mul_(factor).clamp_(max=2.0**24)
    steps.mul_(factor == 1)


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """An update with the learning rate of a step, of which groups may have a share each."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    optimizer.step()
