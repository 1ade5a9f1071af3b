"""Versions of what a run is made of, and the backends that compute its attention.

The first lines of a run name the libraries that it uses: another cuDNN on the path means another
attention.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch

_HEADS = (64, 128)
"""Sizes of heads that are asked about."""


def version_of(package: str) -> str:
    """The version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def nccl() -> str:
    """NCCL's version, on a machine with GPUs."""
    return ".".join(map(str, cast(Any, torch.cuda).nccl.version()))


def library_lines(device: torch.device) -> Iterator[str]:
    """Lines of the GPU, the libraries, and which of them computes attention; none on a CPU."""
    if device.type != "cuda":
        return
    libraries = f"CUDA {torch.version.cuda}, NCCL {nccl()}, cuDNN {_cudnn()}"
    yield f"{torch.cuda.get_device_name(device)}: torch {torch.__version__}, {libraries}"
    backends = ", ".join(f"{size} wide {_attention(size, device)}" for size in _HEADS)
    yield f"causal attention of bfloat16 heads: {backends}"


def _cudnn() -> str:
    """The version of cuDNN that is loaded; torch refuses a version older than its own."""
    try:
        return str(cast(Any, torch.backends).cudnn.version())
    except RuntimeError as error:
        return f"unusable ({' '.join(str(error).split())})"


def _attention(size: int, device: torch.device) -> str:
    """The backend that torch takes for heads of this size."""
    from torch.nn.attention import SDPBackend  # a CPU does without

    q = torch.empty(1, 8, 256, size, dtype=torch.bfloat16, device=device)
    return SDPBackend(cast(Any, torch)._fused_sdp_choice(q, q, q, is_causal=True)).name.lower()
