"""Kernels of a mixture of experts: choice, rows, products."""
