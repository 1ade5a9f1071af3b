"""A program with kernels on one device: its losses are those of the same program with torch's ops,
and no step waits.

The kernels' own cases on a GPU, in every element type, are in `test_cases`.  On the CPU, where each
kernel has a twin in torch, the same programs show that what differs on a GPU is the kernels.
"""

from typing import Any

import pytest
import torch

from helpers.kernels.programs import batch, compiled, emitted
from scalec.compiler.syntax.source import Source
from scalec.runtime import Mesh

STEPS = 5
TEXT = """use "models/llama.scale" {{
  dims {{ vocab = 512  hidden = 256  heads = 4  kv_heads = 2  ffn = 512  layers = 2 }}
}}
train {{
  seq = 128  global_batch = 4  microbatch = 4  steps = 5  precision = {precision}
  optimizer adamw {{ lr = 1e-3  clip = 1.0 }}
  data text {{ files = [python_stdlib] }}
}}"""

RTOL = {"fp32": (1e-5, 1e-4), "bf16": (1e-3, 1e-3)}
"""How far losses may be apart in the first step and in later ones: sums are taken in another order,
and in few bits rounded elsewhere; AdamW, which divides by a gradient's size, makes more of it from
step to step."""


class _Run:
    """A program of the tiny plan on a device."""

    def __init__(self, kernels: str, precision: str, device: str) -> None:
        source = Source("plans/tiny.scale", TEXT.format(precision=precision))
        self.module: Any = emitted(compiled(source, "h100_sxm", kernels), source)
        self.model, self.state = self.module.build(Mesh(self.module.PLAN.mesh, device))
        self.state.initialise(0)
        self.batches = [batch(self.module.PLAN, device, seed) for seed in range(STEPS)]

    def step(self, number: int) -> Any:
        """The metrics of a step."""
        return self.module.train_step(self.model, self.state, self.batches[number], 1e-3)

    def losses(self) -> list[float]:
        """Of all steps."""
        return [float(self.step(number).loss) for number in range(STEPS)]


def _same_losses(precision: str, device: str) -> None:
    ours, plain = (_Run(kernels, precision, device).losses() for kernels in ("triton", "torch"))
    first, later = RTOL[precision]
    assert ours[0] == pytest.approx(plain[0], rel=first)
    assert ours == pytest.approx(plain, rel=later)
    assert ours[0] == pytest.approx(torch.tensor(512.0).log().item(), rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", RTOL)
def test_losses_are_those_of_torch_on_the_cpu(precision: str) -> None:
    _same_losses(precision, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", RTOL)
def test_losses_are_those_of_torch_on_a_gpu(precision: str) -> None:
    _same_losses(precision, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["triton", "torch"])
def test_no_step_waits_for_the_gpu(kernels: str) -> None:
    """After one in which kernels are compiled and memory is taken."""
    run = _Run(kernels, "bf16", "cuda")
    run.step(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [run.step(number) for number in range(1, STEPS)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(metrics.loss) for metrics in found)
