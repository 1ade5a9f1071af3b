"""The stages of a pipeline for programs of torch alone (`torch_step`): their modules, messages, schedules and sums."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # pyright: ignore[reportPrivateUsage]
from torch.distributed.tensor import DTensor, empty
from torch.distributed.tensor.placement_types import Placement

from .torch_ops import wide
from .torch_step import reduced_gradients, total_norm, whole_sum


class Pipeline(nn.Module):
    """A rank's stages under the names of the whole model, and the schedules that run them.

    `rows` is a file with each rank's actions, as torch.distributed.pipelining reads them; evaluation runs its
    forwards.  `shared` has the ranks, on the pipeline's axis, of each parameter that several of them hold.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axis: str,
        stages: Sequence[PipelineStage],
        rows: Path,
        microbatches: int,
        split: Mapping[str, int],
        shared: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        for stage in stages:
            self.take(cast(nn.Module, stage.submod))
        of_input = {name: TensorChunkSpec(dim) for name, dim in split.items()}
        options: dict[str, Any] = {"kwargs_chunk_spec": of_input, "loss_fn": mean_loss, "scale_grads": False}
        schedules = [_PipelineScheduleRuntime([*stages], microbatches, **options) for _ in range(2)]
        self.forwards, self.schedule = schedules
        self.schedule._load_csv(str(rows), format="compute_comms")
        self.forwards.pipeline_order_with_comms = forwards_of(self.schedule.pipeline_order_with_comms)
        self.count = microbatches
        self.group, rank = mesh.get_group(axis), mesh.get_local_rank(axis)
        self.groups = {name: ranks_along(mesh, axis, ranks) for name, ranks in shared.items()}
        self.counted_elsewhere = {name for name, (first, *_) in shared.items() if first != rank}

    def take(self, stage: nn.Module) -> None:
        """Has a stage's parameters and layers too; layers keep the numbers that they have in the whole model."""
        for name, param in stage.named_parameters(recurse=False):
            self.register_parameter(name, param)
        for name, child in stage.named_children():
            if not isinstance(child, nn.ModuleDict):
                self.add_module(name, child)
            elif name in self._modules:
                cast(nn.ModuleDict, self.get_submodule(name)).update(cast(Any, child))
            else:
                self.add_module(name, nn.ModuleDict(cast(Any, child)))

    def run(self, batch: Mapping[str, Tensor], num_tokens: float, backward: bool) -> Tensor:
        """Forward, and perhaps backward, of all microbatches; the mean loss of `num_tokens` labels, on all ranks."""
        losses: list[Tensor] = []
        step: Callable[..., object] = self.schedule.step if backward else self.forwards.eval
        each = torch.full((self.count,), num_tokens or 1)
        step(**batch, target=each, losses=losses, return_outputs=False)
        if losses:
            return self.whole(whole_sum([loss.detach() for loss in losses]))
        param = next(self.parameters())
        return self.whole(torch.zeros((), dtype=wide(param), device=param.device))

    def gradients(self, dtype: torch.dtype | None = None) -> list[DTensor]:
        """All gradients after the sums that they still are, over ranks and over the stages that share a parameter."""
        found = reduced_gradients(self, dtype)
        for (name, _), gradient in zip(self.named_parameters(), found, strict=True):
            if name in self.groups:
                dist.all_reduce(gradient.to_local(), group=self.groups[name])
        return found

    def total_norm(self, gradients: Sequence[DTensor]) -> Tensor:
        """The norm of all stages' gradients; those that several ranks hold count once."""
        pairs = zip(self.named_parameters(), gradients, strict=True)
        own = [gradient for (name, _), gradient in pairs if name not in self.counted_elsewhere]
        return self.whole(total_norm(own).square()).sqrt()

    def whole(self, part: Tensor) -> Tensor:
        """The sum of all stages' parts."""
        dist.all_reduce(part, group=self.group)
        return part


def mean_loss(loss_sum: Tensor, num_tokens: Tensor) -> Tensor:
    """The part that a microbatch has of the mean loss; a schedule gives each its entry of `target`."""
    return loss_sum / num_tokens.item()


def forwards_of(rows: Mapping[int, Sequence[Any]]) -> dict[int, list[Any]]:
    """The actions of evaluation: forwards, what they send and receive, and gathered parameters."""
    return {rank: [each for each in row if re.search("F|SHARD", str(each))] for rank, row in rows.items()}


def ranks_along(mesh: DeviceMesh, axis: str, places: Sequence[int]) -> dist.ProcessGroup:
    """The group of some ranks of a mesh axis, each beside the ranks that differ from this one on no other axis."""
    names = cast(tuple[str, ...], mesh.mesh_dim_names)
    each = mesh.mesh.movedim(names.index(axis), -1).reshape(-1, mesh.size(names.index(axis)))[:, [*places]]
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(each.tolist())[0])


def pipeline_stage(
    module: nn.Module,
    stage: int,
    stages: int,
    mesh: DeviceMesh,
    axis: str,
    crossing: Callable[[int], Sequence[tuple[Tensor, Tensor | None]]],
) -> PipelineStage:
    """A stage; `crossing` gives examples of the values, and of their gradients, that cross after one."""
    received = crossing(stage - 1) if stage else []
    sent = crossing(stage) if stage < stages - 1 else [(torch.empty(()), None)]
    return PipelineStage(
        module,
        stage,
        stages,
        torch.device(mesh.device_type),
        input_args=tuple(value for value, _ in received),
        input_grads=tuple(gradient for _, gradient in received),
        output_args=tuple(value for value, _ in sent),
        output_grads=tuple(gradient for _, gradient in sent),
        group=mesh.get_group(axis),
    )


def example(
    mesh: DeviceMesh,
    *sizes: int,
    dtype: torch.dtype,
    placements: Sequence[Placement],
    gradient: Sequence[Placement] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A value of a global shape, and its gradient if it has one: `PipelineStage` reads shapes and placements."""
    make = partial(empty, sizes, dtype=dtype, device_mesh=mesh)
    value = make(placements=placements, requires_grad=gradient is not None)
    return value, None if gradient is None else make(placements=gradient)


def stage_module(make: Callable[[int], nn.Module], stage: int) -> nn.Module:
    """The module of a stage; all stages draw the same random values, of which each keeps its own."""
    with torch.random.fork_rng():
        return make(stage)


def share(stages: Sequence[nn.Module], name: str) -> None:
    """Makes one parameter of those that several stages of a rank have."""
    having = [stage for stage in stages if hasattr(stage, name)]
    for each in having[1:]:
        each.register_parameter(name, getattr(having[0], name))


def stage_layers(layer: Callable[[], nn.Module], count: int, own: range) -> nn.ModuleDict:
    """A stage's own layers by number.  All are made, so that random values are those of any mesh."""
    return nn.ModuleDict({str(i): made for i, made in ((i, layer()) for i in range(count)) if i in own})


def all_microbatches(each: Sequence[Tensor], dim: int) -> DTensor:
    """Microbatches as one DTensor, of which a schedule splits each rank's part."""
    first = cast(DTensor, each[0])
    local = torch.cat([cast(DTensor, part).to_local() for part in each], dim)
    return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)
