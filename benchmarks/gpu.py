"""Timing, memory and shapes on one GPU, or on the CPU where it is only checked that all this works.

Non-goals: what is measured (`gpu_kernels`, `gpu_steps`), and how results are printed (`measure`).
"""

import gc
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from scalec.compiler.analysis.kernel_tiles import KERNELS, USUAL, chip_of, nearest, tiles_of

PEAKS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312}
"""TFLOP/s of dense bfloat16 by NVIDIA's data sheets, by a word of the device's name; the first
that fits.
"""
GIB = 1 << 30
COLD = 2 * GIB
"""Bytes written between calls: more than any L2 holds, and for longer than the host takes for the
call that is timed.

Else the device would wait between the first event and the call's kernels, and that would count.
"""


@dataclass(frozen=True)
class Machine:
    """Where it is measured; `toy` says that sizes are small, and results of no interest.

    Before a GPU's times are taken it is busy for `warm` seconds, as its clocks fall while it waits
    for a compiler.
    """

    device: torch.device
    toy: bool
    repeats: int
    warm: float = 0.2

    @property
    def on_gpu(self) -> bool:
        """Whether results mean anything."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """In which everything computes."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def backend(self) -> str:
        """The backend of torch.compile; inductor takes too long for a check."""
        return "inductor" if self.on_gpu else "aot_eager"

    @property
    def peak(self) -> float:
        """FLOP/s of products in bfloat16; 0 where it is not known."""
        name = torch.cuda.get_device_name() if self.on_gpu else ""
        return next((peak * 1e12 for word, peak in PEAKS.items() if word in name), 0.0)

    def __str__(self) -> str:
        gpu = "toy sizes on the CPU: of no interest"
        if self.on_gpu:
            gpu = (
                f"{torch.cuda.get_device_name()}, driver {_driver()}, CUDA"
                f" {torch.version.cuda}, {_libraries()}"
            )
        try:
            triton = version("triton")
        except PackageNotFoundError:
            triton = "none"
        return (
            f"{gpu}; torch {torch.__version__}, Triton {triton}, Python {platform.python_version()}"
        )

    def failure(self, error: Exception) -> str:
        """The words for what went wrong.

        Raises it where the device can do no more in this process.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return "out of memory"
        if self.on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError:  # after an illegal access each call fails
                raise error from None
        return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile, with constant shapes."""
        return torch.compile(function, backend=self.backend, dynamic=False)

    def milliseconds(
        self, call: Callable[[], object], repeats: int = 0, cold: bool = True
    ) -> float:
        """The median of a call after at least three others; `cold` writes over the L2 cache
        before each.
        """
        for _ in range(3):
            call()
        begun = perf_counter()
        while self.on_gpu and perf_counter() < begun + self.warm:
            call()
            torch.cuda.synchronize()
        times = [self._time(call, cold) for _ in range(repeats or self.repeats)]
        return median(time() for time in times)

    def _time(self, call: Callable[[], object], cold: bool) -> Callable[[], float]:
        """Calls it, and says later how long that took: on a GPU the host does not wait in
        between.
        """
        if not self.on_gpu:
            start = perf_counter()
            call()
            elapsed = perf_counter() - start
            return lambda: elapsed * 1e3
        if cold:
            torch.empty(COLD, dtype=torch.int8, device=self.device).zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()

        def elapsed_ms() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return elapsed_ms

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """By how much allocated memory grows at most while it runs; 0 on the CPU."""
        if not self.on_gpu:
            call()
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def clear(self) -> None:
        """Gives back what nobody holds, and what was compiled."""
        torch.compiler.reset()
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def randn(self, *shape: int) -> Tensor:
        """Operands that have gradients."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype, requires_grad=True)


def _libraries() -> str:
    """Libraries of torch's products, attention and collectives; which attention it picks
    decides over a step.
    """
    nccl = (
        ".".join(map(str, cast(Any, torch.cuda).nccl.version()))
        if torch.distributed.is_nccl_available()
        else "none"
    )
    return (
        f"cuDNN {torch.backends.cudnn.version()}, NCCL {nccl}, causal attention by"
        f" {picked_attention()}"
    )


def picked_attention() -> str:
    """The backend that scaled_dot_product_attention picks for a step of Llama 8B."""
    q, k = (
        torch.empty(1, heads, 8192, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8)
    )
    number = cast(Any, torch)._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=True)
    return next(
        name for name, each in SDPBackend.__members__.items() if int(cast(Any, each)) == number
    )


def _driver() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def tiles(kernels: Any, name: str, size: int) -> dict[int, Any]:
    """The tile that a program for this chip has for a class and a size."""
    kernel = next(each for each in KERNELS.values() if each.name == name)
    own = tiles_of(chip())[kernel.tuned]
    found = own[str(size)] if kernel.tile == "Blocks" else nearest(own, size)
    part = {"Blocks": kernels.Block, "Products": kernels.Product}.get(kernel.tile)
    if part:
        found = {name: part(**block) for name, block in found.items()}
    return {size: getattr(kernels, kernel.tile)(**found)}


def chip() -> str:
    """That by which the table calls this GPU; where there is none, the chip of plans that name
    none.
    """
    if not torch.cuda.is_available():
        return USUAL
    major, minor = torch.cuda.get_device_capability()
    return chip_of(10 * major + minor)
