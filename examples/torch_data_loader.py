"""torchrun --standalone --nproc-per-node=4 examples/torch_data_loader.py out/tiny_llama 20

A compiled plan inside a loop of your own, fed by torch's DataLoader: compile
`plans/tiny_llama.scale` first.  Each rank reads the rows of its own place on the axes of data;
ranks that share a place read the same ones.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from scalec.runtime import Batch, Mesh


class Windows(Dataset[Tensor]):
    """Windows of a text's bytes, [seq + 1] each: your own data in its place."""

    def __init__(self, text: bytes, seq: int) -> None:
        self.bytes, self.seq = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), seq

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.seq

    def __getitem__(self, index: int) -> Tensor:
        return self.bytes[index * self.seq :][: self.seq + 1]


def batches(program: ModuleType, mesh: Mesh, data: Dataset[Tensor]) -> Iterator[Batch]:
    """This rank's part of each global batch."""
    plan = program.PLAN
    axis = mesh.axis(*plan.inputs["tokens"].split["batch"])
    sampler: DistributedSampler[Tensor] = DistributedSampler(
        data, axis.size, axis.rank, seed=plan.seed, drop_last=True
    )
    loader = DataLoader(
        data, batch_size=plan.global_batch // axis.size, sampler=sampler, drop_last=True
    )
    seq_first = plan.inputs["tokens"].dims == ("seq", "batch")
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for rows in loader:
            parts = rows.view(plan.microbatches, -1, plan.seq + 1)  # [microbatches, b, s + 1]
            parts = parts.transpose(1, 2) if seq_first else parts
            cut = 1 if seq_first else 2
            tokens, labels = (parts.narrow(cut, first, plan.seq).contiguous() for first in (0, 1))
            yield Batch(tokens=tokens, labels=labels)


def train(program: ModuleType, text: bytes, steps: int) -> list[float]:
    """So many steps; the loss of each."""
    mesh, plan = Mesh(program.PLAN.mesh), program.PLAN
    model, state = program.build(mesh)
    state.initialise(plan.seed)
    losses: list[float] = []
    for step, batch in zip(
        range(steps), batches(program, mesh, Windows(text, plan.seq)), strict=False
    ):
        metrics = program.train_step(model, state, batch, plan.schedule.lr(step, steps, plan.lr))
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    dist.init_process_group()
    found = train(import_module("train"), Path(__file__).read_bytes() * 200, int(sys.argv[2]))
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f}, after {len(found)} steps {found[-1]:.3f}")
    dist.destroy_process_group()
