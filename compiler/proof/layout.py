"""Where the elements of tensors are: dims renamed, positions cut, joined or permuted, in any
arithmetic.  Gradients go the way back.
"""

from collections.abc import Sequence

import numpy as np

from .tensors import Array, Dims, Numbers, Tensor, degree_of


def rename_dims(n: Numbers, x: Tensor, dims: Dims) -> Tensor:
    """The same array, its dims by other names."""
    renamed = Tensor(dims, x.array, x.degree)
    return n.with_gradient(renamed, [x], lambda grad, i: Tensor(x.dims, grad.array, grad.degree))


def append_dim(n: Numbers, x: Tensor, dim: str) -> Tensor:
    """The tensor with a last dim of size 1."""
    longer = Tensor((*x.dims, dim), x.array[..., None], x.degree)
    return n.with_gradient(
        longer, [x], lambda grad, i: Tensor(x.dims, grad.array[..., 0], grad.degree)
    )


def split_last_dim(n: Numbers, x: Tensor, sizes: Sequence[int], names: Dims) -> list[Tensor]:
    """Slices along the last dim; each has a size and a name for its own last dim."""
    slices, start = list[Tensor](), 0
    for size, name in zip(sizes, names, strict=True):
        slices.append(_cut_last_dim(n, x, slice(start, start + size), name))
        start += size
    return slices


def _cut_last_dim(n: Numbers, x: Tensor, positions: slice, name: str) -> Tensor:
    def back(grad: Tensor, i: int) -> Tensor:
        whole = np.zeros((*grad.array.shape[:-1], x.array.shape[-1]), grad.array.dtype)
        whole[..., positions] = grad.array
        return Tensor(x.dims, whole, grad.degree)

    part = Tensor((*x.dims[:-1], name), x.array[..., positions], x.degree)
    return n.with_gradient(part, [x], back)


def join_last_dim(n: Numbers, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
    """The tensors side by side along the last dim of `dims`.

    Some may lack others of these dims, or be the same on all ranks.
    """
    arrays = [x.onto((*dims[:-1], x.dims[-1])) for x in tensors]
    before = np.broadcast_shapes(*(array.shape[:-1] for array in arrays))
    parts = [np.broadcast_to(array, (*before, array.shape[-1])) for array in arrays]
    joined = Tensor(dims, np.concatenate(parts, axis=-1), degree_of(tensors))
    ends = np.cumsum([array.shape[-1] for array in arrays])

    def back(grad: Tensor, i: int) -> Tensor:
        x = tensors[i]
        part = grad.array[..., ends[i] - x.array.shape[-1] : ends[i]]
        return n.product(x.dims, Tensor((*dims[:-1], x.dims[-1]), part, grad.degree))

    return n.with_gradient(joined, tensors, back)


def permute_positions(n: Numbers, x: Tensor, dim: str, order: Array) -> Tensor:
    """The tensor with its positions along a dim in another order."""
    axis, back_order = x.lead + x.dims.index(dim), np.argsort(order)

    def permute(tensor: Tensor, positions: Array) -> Tensor:
        return Tensor(tensor.dims, np.take(tensor.array, positions, axis), tensor.degree)

    return n.with_gradient(permute(x, order), [x], lambda grad, i: permute(grad, back_order))


def take_slice(n: Numbers, x: Tensor, index: int) -> Tensor:
    """One slice along the first dim."""

    def back(grad: Tensor, i: int) -> Tensor:
        shape = (*grad.array.shape[: x.lead], *x.array.shape[x.lead :])
        whole = np.zeros(shape, grad.array.dtype)
        whole[(slice(None),) * x.lead + (index,)] = grad.array
        return Tensor(x.dims, whole, grad.degree)

    return n.with_gradient(x.get_slice(index), [x], back)
