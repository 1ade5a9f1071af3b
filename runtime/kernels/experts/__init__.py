"""Kernels of a mixture of experts: choice, rows, products."""

from .rows import Combine, Dispatch
from .top_k import TopK

__all__ = ["Combine", "Dispatch", "TopK"]
