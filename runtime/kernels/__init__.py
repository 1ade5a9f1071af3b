"""Kernels for GPUs, one op a file; nothing else of the runtime imports them."""
