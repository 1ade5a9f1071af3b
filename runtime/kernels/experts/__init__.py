"""Kernels of a mixture of experts: choice, rows, products."""

from .grouped_linear import GroupedLinear, Product, Products
from .losses import Balance, RouterZ
from .rows import Combine, Dispatch
from .sort import SortByExpert
from .top_k import TopK

__all__ = [
    "Balance",
    "Combine",
    "Dispatch",
    "GroupedLinear",
    "Product",
    "Products",
    "RouterZ",
    "SortByExpert",
    "TopK",
]
