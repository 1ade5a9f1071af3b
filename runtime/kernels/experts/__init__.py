"""Kernels of a mixture of experts: choice, rows, products."""

from .exchange import Exchange, ExchangeBack, ExchangeCounts
from .grouped_linear import GroupedLinear, Product, Products
from .losses import Balance, RouterZ
from .rows import Combine, Dispatch
from .sort import SortByExpert
from .top_k import TopK

__all__ = [
    "Balance",
    "Combine",
    "Dispatch",
    "Exchange",
    "ExchangeBack",
    "ExchangeCounts",
    "GroupedLinear",
    "Product",
    "Products",
    "RouterZ",
    "SortByExpert",
    "TopK",
]
