"""Cross entropy of a product, in chunks, against torch's own of whole logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cases import PRECISIONS, Precision, randn
from kernels.losses import LOSSES, PLAIN, Loss, check_loss, joined, labels_of
from scalec.runtime.kernels import LinearCrossEntropy, LinearParts, Tile


def _tiles(columns: int) -> dict[int, Tile]:
    return {columns: Tile(rows=1, warps=4, columns=128)}


def _operands(shape: tuple[int, ...], columns: int, precision: Precision, device: str) -> tuple[Tensor, Tensor]:
    """x [*shape, 16] and weight [columns, 16], of logits near one."""
    x = randn(*shape, 16, precision=precision, device=device)
    weight = randn(columns, 16, precision=precision, device=device, seed=1)
    return x, (weight.detach() / 4).requires_grad_()


def _check_classwise(columns: int, chunk: int, world: int, loss: Loss, precision: Precision, device: str) -> None:
    """Of each rank `columns` of the vocabulary."""
    operands = _operands((2, 3), columns * world, precision, device)
    labels = labels_of((2, 3), loss.classes or columns * world, device)
    op = LinearParts(_tiles(columns), chunk)

    def of_ranks(x: Tensor, weight: Tensor) -> Tensor:
        shares = weight.chunk(world)
        return joined(
            lambda axis: op(x, shares[axis.rank], labels, axis, **loss.of_parts), labels, columns, world, loss
        )

    check_loss(of_ranks, lambda x, w: loss.of(F.linear(x, w), labels.cpu()), operands, precision)


def _check_tokenwise(rows: int, chunk: int, loss: Loss, precision: Precision, device: str) -> None:
    operands, labels = _operands((rows,), 70, precision, device), labels_of((rows,), loss.classes or 70, device)
    op = LinearCrossEntropy(_tiles(70), chunk)
    check_loss(
        lambda x, w: op(x, w, labels, **loss.of_whole),
        lambda x, w: loss.of(F.linear(x, w), labels.cpu()),
        operands,
        precision,
    )


def case_chunks_of_classes(device: str) -> None:
    """One, several, and a tail; of one class."""
    for precision in PRECISIONS[device]:
        for columns, chunk in ((140, 256), (140, 70), (140, 50), (7, 1)):
            _check_classwise(columns, chunk, 1, LOSSES[-1], precision, device)


def case_chunks_of_classes_on_several_ranks(device: str) -> None:
    """The last has padding alone, as have some chunks of the one before."""
    for precision in PRECISIONS[device]:
        for loss in (Loss(70), Loss(70, smoothing=0.1, z=0.01)):
            _check_classwise(50, 16, 3, loss, precision, device)


def case_chunks_of_tokens(device: str) -> None:
    for precision in PRECISIONS[device]:
        for rows, chunk in ((7, 8), (7, 3), (1, 1)):
            _check_tokenwise(rows, chunk, LOSSES[-1], precision, device)
        _check_tokenwise(5, 2, Loss(60), precision, device)


def case_no_tokens(device: str) -> None:
    for precision in PRECISIONS[device]:
        _check_tokenwise(0, 3, PLAIN, precision, device)


TILES = {columns: Tile(rows=1, warps=8, columns=4096) for columns in (128256, 16032)}


def examples(device: str, dtype: torch.dtype) -> None:
    """The head of an 8B-shaped model, whole and over 8 ranks."""
    x = torch.empty(2048, 4096, device=device, dtype=dtype, requires_grad=True)
    labels = torch.empty(2048, device=device, dtype=torch.int64)
    for columns in TILES:
        weight = torch.empty(columns, 4096, device=device, dtype=dtype, requires_grad=True)
        _, z, t = LinearParts(TILES, 8064)(x, weight, labels)
        (z + t).sum().backward()
        LinearCrossEntropy(TILES, 1024)(x, weight, labels).backward()
