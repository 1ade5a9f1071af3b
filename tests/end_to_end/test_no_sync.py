"""Within a step the host never waits for the device: nothing that a step computes is read by
Python.

On the CPU such reads are seen as torch's dispatcher sees them; on a GPU torch's own debug mode
raises.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import Case
from scalec.runtime import Mesh

READS = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
}
"""What has a result for Python, or one whose shape depends on values: on CUDA the host waits
for it.
"""
CASES = [
    Case(clip=0.05, optimizer="adamw", microbatches=2),
    Case(dp=2, tp=2, sp=True, clip=0.05, optimizer="adamw", precision="bf16", recompute="full"),
    Case(
        dp=2, clip=0.05, optimizer="adamw", precision="fp16", state="zero 3 over dp", microbatches=2
    ),
    Case(pp=2, clip=0.05, optimizer="momentum", microbatches=2, padded=True, smoothing=0.1, z=0.01),
]


class _Reads(TorchDispatchMode):
    """Takes note of the reads while entered; in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _reads(module: Any, batch: harness.Inputs) -> list[str]:
    model, state = module.build(Mesh(module.PLAN.mesh))
    state.initialise(0)
    local = harness.local_batch(module.PLAN, *batch)
    module.train_step(model, state, local, 0.1)
    with _Reads() as reads:
        module.train_step(model, state, local, 0.1)
        module.eval_step(model, state, local)
    return reads.found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_reads_nothing_that_it_computes(case: Case, tmp_path: Path) -> None:
    batch = next(harness.batches(case, 1))
    assert (
        run_ranks(case.ranks, _reads, harness.load_case(case, tmp_path), batch) == [[]] * case.ranks
    )


def test_a_read_is_noticed() -> None:
    with _Reads() as reads:
        assert bool(torch.ones(()) > 0)
        torch.ones(2).sum().item()
    assert len(reads.found) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_on_a_gpu_no_step_waits(precision: str, tmp_path: Path) -> None:
    case = Case(clip=0.05, optimizer="adamw", microbatches=2, precision=precision)
    module: Any = harness.load_case(case, tmp_path)
    model, state = module.build(Mesh({"dp": 1, "tp": 1}, "cuda"))
    state.initialise(0)
    tokens, labels = (
        rows.view(2, -1, rows.shape[-1]).cuda() for rows in next(harness.batches(case, 1))
    )
    batch = module.Batch(tokens, labels)
    module.train_step(model, state, batch, 0.1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        module.train_step(model, state, batch, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
