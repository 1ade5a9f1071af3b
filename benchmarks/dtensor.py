"""The plain Llama spread over ranks by torch's own means: `parallelize_module` over tp, then FSDP2
over dp.

The usual plan (as in torchtitan): loss over a sharded vocabulary, with or without sequence
parallelism.  Weights are gathered once a microbatch and kept until its backward is done; gradients
are reduced once a step.
"""

from typing import cast

import plain
import torch
from emitted import CLIP
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


def spread_layer(layer: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """One decoder layer, in place."""
    parallelize_module(layer, mesh["tp"], _layer_styles(sequence_parallel))
    _shard(layer, mesh)


def spread(model: plain.Llama, mesh: DeviceMesh) -> None:
    """A whole model with sequence parallelism, in place."""
    styles = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh["tp"], styles)
    for layer in model.layers:
        spread_layer(layer, mesh, sequence_parallel=True)
    _shard(model, mesh)


def _layer_styles(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    columns = ("attention.wq", "attention.wk", "attention.wv", "mlp.w_gate", "mlp.w_up")
    rows = ("attention.wo", "mlp.w_down")
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
    if not sequence_parallel:
        return styles | {name: RowwiseParallel() for name in rows}
    scatter, whole = Shard(1), Replicate()
    return {
        **styles,
        **{name: RowwiseParallel(output_layouts=scatter) for name in rows},
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(scatter, None, None), desired_input_layouts=(whole, None, None)
        ),
        "mlp": PrepareModuleInput(input_layouts=scatter, desired_input_layouts=whole),
    }


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 where there is something to shard over."""
    if mesh["dp"].size() > 1:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)


def step(
    model: plain.Llama, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor
) -> Tensor:
    """One training step on this rank's [microbatches, rows, seq]; the mean loss of its own rows."""
    total = torch.zeros(())
    for number, part in enumerate(zip(tokens, labels, strict=True), start=1):
        _reduce_gradients(model, number == len(tokens))
        with loss_parallel():
            loss = plain.loss_of(model(part[0]), part[1]) / len(tokens)
            loss.backward()
        total += cast(DTensor, loss.detach()).full_tensor()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _reduce_gradients(model: nn.Module, last: bool) -> None:
    """Whether the next backward reduces gradients and frees gathered weights."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
