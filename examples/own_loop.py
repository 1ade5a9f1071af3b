"""torchrun --standalone --nproc-per-node=4 examples/own_loop.py out/tiny_llama checkpoint 20

A compiled plan inside a loop of your own, whose state torch.distributed.checkpoint saves and loads:
compile `plans/tiny_llama.scale` first.  Started once more, also on the ranks of another mesh, it
goes on.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.stateful import Stateful

from scalec.runtime import Batch, Mesh

dcp: Any = checkpoint  # its types are partial


class Progress(Stateful):
    """The number of steps that are done: as any object of your own, it is saved beside the
    state.
    """

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.steps = state_dict["steps"]


def random_batch(program: ModuleType, mesh: Mesh, step: int) -> Batch:
    """This rank's part of a step's tokens, each label the token itself: your own data in its
    place.
    """
    plan, layout = program.PLAN, program.PLAN.inputs["tokens"]
    shape = (plan.microbatches, plan.global_batch // plan.microbatches, plan.seq)
    rows = torch.randint(plan.vocab, shape, generator=torch.Generator().manual_seed(step))
    axes = layout.split.get("batch", ())
    rows = rows.chunk(mesh.size(*axes), 1)[mesh.rank(*axes)]
    rows = (rows.transpose(1, 2) if layout.dims == ("seq", "batch") else rows).contiguous()
    return Batch(tokens=rows, labels=rows)


def train(program: ModuleType, folder: Path, steps: int) -> list[float]:
    """The losses of steps up to `steps`, from the checkpoint in `folder` if there is one; then
    it is saved there.
    """
    mesh, plan = Mesh(program.PLAN.mesh), program.PLAN
    model, state = program.build(mesh)
    progress = Progress()
    saved = {"state": state, "progress": progress}
    if (folder / ".metadata").exists():
        dcp.load(saved, checkpoint_id=folder)
    else:
        state.initialise(plan.seed)
    losses: list[float] = []
    while progress.steps < steps:
        batch, rate = (
            random_batch(program, mesh, progress.steps),
            plan.schedule.lr(progress.steps, plan.steps, plan.lr),
        )
        losses.append(float(program.train_step(model, state, batch, rate).loss))
        progress.steps += 1
    dcp.save(saved, checkpoint_id=folder)
    return losses


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    dist.init_process_group()
    found = train(import_module("train"), Path(sys.argv[2]), int(sys.argv[3]))
    if dist.get_rank() == 0 and found:
        print(f"loss {found[0]:.3f}, after {len(found)} more steps {found[-1]:.3f}")
    dist.destroy_process_group()
