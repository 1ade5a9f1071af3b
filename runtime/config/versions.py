"""Versions of what a run is made of."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch


def version_of(package: str) -> str:
    """The version of an installed package; "" of one that is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def nccl() -> str:
    """NCCL's, on a machine with GPUs."""
    return ".".join(map(str, cast(Any, torch.cuda).nccl.version()))
