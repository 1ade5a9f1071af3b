"""Kernels of a mixture of experts: choice, rows, products."""

# pyright: reportUnusedImport=false

from .exchange import Exchange, ExchangeBack, ExchangeCounts
from .grouped_linear import GroupedLinear, Product, Products
from .losses import Balance, RouterZ
from .rows import Combine, Dispatch
from .sort import SortByExpert
from .top_k import TopK
