"""GPUs by name: their memory, the part of it that tensors cannot use, and whether Triton's
kernels run on them.
"""

from attrs import frozen

from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing, wrong
from .settings import AUTO, TORCH, TRITON, Cluster, Train


@frozen
class Gpu:
    """A GPU by NVIDIA's data sheets.

    memory      in GB; taken as GiB
    capability  of its multiprocessors, for instance 90 for sm_90
    linked      whether NVLink connects such GPUs
    corrected   whether codes of error correction take a part of the memory: of GDDR6, not of HBM
    """

    memory: int
    capability: int
    linked: bool = False
    corrected: bool = False

    @property
    def product_rows(self) -> int:
        """The rows that tensor cores multiply at a time, in the fastest product that they have."""
        return WARPGROUP_ROWS if 90 <= self.capability < 120 else PRODUCT_ROWS

    def reserve(self, communicators: int) -> int:
        """Bytes that no tensor of a step gets, in a program with `communicators` groups of
        ranks.
        """
        return self._reserve(communicators, CONTEXT, LINKED_CHANNELS if self.linked else CHANNELS)

    def reserve_range(self, communicators: int) -> tuple[int, int]:
        """The least and the most bytes that the reserve may have: the context and NCCL's channels
        are estimates.
        """
        channels = LINKED_CHANNEL_RANGE if self.linked else CHANNEL_RANGE
        (low_context, high_context), (low_channels, high_channels) = CONTEXT_RANGE, channels
        low = self._reserve(communicators, low_context, low_channels)
        high = self._reserve(communicators, high_context, high_channels)
        return low, high

    def _reserve(self, communicators: int, context: int, channels: int) -> int:
        """The reserve with a context of some bytes and some channels in each ring."""
        hidden = self.memory * GIB // DRIVER
        if self.corrected:
            hidden += self.memory * GIB // CODES
        workspaces = HANDLES * (HOPPER_WORKSPACE if self.capability >= 90 else WORKSPACE)
        return hidden + context + workspaces + communicators * channels * CHANNEL


PRODUCT_ROWS, WARPGROUP_ROWS = 16, 64
"""Rows of matrix instructions of a warp, `mma` m16n8k16, and of four, `wgmma` and `tcgen05.mma`
(PTX ISA).
"""

KIB, MIB, GIB = 2**10, 2**20, 2**30

DRIVER, CODES = 64, 16
"""One part in 64 that the driver keeps: `nvidia-smi` shows 79.6 GiB of an H100's 80, 140.4 of an
H200's 141, and torch half a GiB less; and one in 16 for GDDR6's codes: 22.5 GiB of an L4's or an
A10G's 24, 45.0 of an L40S' 48."""

CONTEXT = 512 * MIB
"""CUDA's context with the kernels that are loaded as they are called: an estimate, not measured."""

CONTEXT_RANGE = 256 * MIB, 1024 * MIB
"""Half and twice the estimate."""

HANDLES, WORKSPACE, HOPPER_WORKSPACE = 4, 8320 * KIB, 32 * MIB
"""cuBLAS' workspaces: forward's thread and autograd's have a handle each of cuBLAS and of
cuBLASLt.  Sizes are torch's defaults (notes/cuda.rst, `CUBLAS_WORKSPACE_CONFIG`: 2 · 4096 + 8 · 16
KiB, from Hopper on 8 · 4096 KiB)."""

CHANNELS, LINKED_CHANNELS, CHANNEL = 4, 24, 12 * MIB
"""NCCL's buffers, in a ring: of each channel 10 MiB to receive into and 2 MiB to send from, as
NVIDIA/nccl#1685 lists them.  How many channels there are is an estimate: memory is linear in it
(NVIDIA/nccl#986)."""

CHANNEL_RANGE, LINKED_CHANNEL_RANGE = (2, 8), (12, 32)
"""Half the estimates; and twice those of PCIe, a third more of NVLink's.  They have no source."""


GPUS = {
    "a100_40gb": Gpu(40, 80, linked=True),
    "a100_80gb": Gpu(80, 80, linked=True),
    "a10g": Gpu(24, 86, corrected=True),
    "b200": Gpu(180, 100, linked=True),
    "b300": Gpu(270, 103, linked=True),
    "gb200": Gpu(186, 100, linked=True),
    "gb300": Gpu(279, 103, linked=True),
    "h100_500w": Gpu(96, 90, linked=True),
    "h100_nvl": Gpu(94, 90, linked=True),
    "h100_pcie": Gpu(80, 90),
    "h100_sxm": Gpu(80, 90, linked=True),
    "h200": Gpu(141, 90, linked=True),
    "h800_sxm": Gpu(80, 90, linked=True),
    "l4": Gpu(24, 89, corrected=True),
    "l40s": Gpu(48, 89, corrected=True),
    "rtx_3090": Gpu(24, 86),
    "rtx_4090": Gpu(24, 89),
    "rtx_5090": Gpu(32, 120),
    "rtx_a6000": Gpu(48, 86, corrected=True),
    "t4": Gpu(16, 75, corrected=True),
    "v100_16gb": Gpu(16, 70, linked=True),
    "v100_32gb": Gpu(32, 70, linked=True),
}

ANOTHER = (
    "for another GPU give its memory, as in `gpu = mine  memory = 64GiB`; it gets no Triton"
    " kernels by default"
)

CPU = "cpu"
"""The name of the device where there is no GPU, in a cluster with a file of measured figures."""

LEAST = 80
"""The first capability with bf16 and asynchronous copies, for which the kernels are written."""


def check_gpu(cluster: Cluster, diagnostics: Diagnostics) -> None:
    """Checks that a plan names a GPU of the table, or gives the memory of its GPU."""
    name, span = cluster.gpu, cluster.spans["gpu"]
    if cluster.memory and not name:
        help = "name the GPU; any name will do"
        diagnostics.error(
            "E0402", "a `cluster` with `memory` needs `gpu`", cluster.spans["memory"], help=help
        )
    elif name and name not in GPUS and cluster.memory is None and not cluster.hardware:
        notes = [Note(None, f"known GPUs: {listing(GPUS)}"), Note(None, ANOTHER)]
        diagnostics.error(
            "E0415", f"there is no GPU `{name}`", span, notes=notes, help=help_for_gpu(name)
        )


def help_for_gpu(name: str) -> str:
    """Help with the GPUs whose names begin like an unknown one, or else the GPU whose name it
    misspells; "" if none is like it.
    """
    alike = [f"`{gpu_name}`" for gpu_name in GPUS if gpu_name.startswith(name.casefold())]
    if alike:
        return f"did you mean {' or '.join(alike)}?"
    return did_you_mean(name, GPUS)


def gpu(cluster: Cluster) -> Gpu | None:
    """The GPU of a cluster, if it names one that is known."""
    return GPUS.get(cluster.gpu)


def kernels_for(train: Train, cluster: Cluster) -> str:
    """The implementation that the plan chooses, or the one that suits its GPU.

    Raises PlanError where the GPU is too old for the plan's choice.
    """
    known_gpu = GPUS.get(cluster.gpu)
    able = known_gpu is not None and known_gpu.capability >= LEAST
    if known_gpu and train.kernels == TRITON and not able:
        message = f"Triton's kernels are for GPUs of compute capability {LEAST / 10} and above"
        label = f"`{cluster.gpu}` has {known_gpu.capability / 10}"
        span = train.spans["kernels"]
        raise wrong("E0413", message, span, label, help="write `kernels = torch`")
    if train.kernels != AUTO:
        return train.kernels
    return TRITON if able else TORCH
