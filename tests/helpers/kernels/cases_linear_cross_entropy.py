"""Cross entropy of a product, in chunks, against torch's own of whole logits."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.kernels.cases import PRECISIONS, Precision, randn
from helpers.kernels.losses import LOSSES, PLAIN, Loss, check_loss, joined, labels_of
from scalec.runtime import Axis
from scalec.runtime.kernels import LinearCrossEntropy, LinearSoftmaxStats, Tile


def _tiles(columns: int) -> dict[int, Tile]:
    return {columns: Tile(rows=1, warps=4, columns=128)}


def _operands(
    shape: tuple[int, ...], columns: int, precision: Precision, device: str, *, biased: bool
) -> tuple[Tensor, ...]:
    """x [*shape, 16], weight [columns, 16] and perhaps bias [columns], of logits near one."""
    x = randn(*shape, 16, precision=precision, device=device)
    weight = randn(columns, 16, precision=precision, device=device, seed=1)
    weight = (weight.detach() / 4).requires_grad_()
    return (
        (x, weight, randn(columns, precision=precision, device=device, seed=2))
        if biased
        else (x, weight)
    )


def _check_classwise(
    columns: int,
    chunk: int,
    world: int,
    loss: Loss,
    precision: Precision,
    device: str,
    *,
    biased: bool = False,
) -> None:
    """Each rank has `columns` of the vocabulary."""
    operands = _operands((2, 3), columns * world, precision, device, biased=biased)
    labels = labels_of((2, 3), loss.classes or columns * world, device)
    op = LinearSoftmaxStats(_tiles(columns), chunk)

    def of_ranks(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        shares, biases = weight.chunk(world), [None] * world if bias is None else bias.chunk(world)

        def of_rank(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
            return op(x, shares[axis.rank], labels, axis, **loss.of_parts, bias=biases[axis.rank])

        return joined(of_rank, labels, columns, world, loss)

    check_loss(
        of_ranks, lambda *operands: loss.of(F.linear(*operands), labels.cpu()), operands, precision
    )


def _check_tokenwise(
    rows: int, chunk: int, loss: Loss, precision: Precision, device: str, *, biased: bool = False
) -> None:
    operands = _operands((rows,), 70, precision, device, biased=biased)
    labels, op = (
        labels_of((rows,), loss.classes or 70, device),
        LinearCrossEntropy(_tiles(70), chunk),
    )

    def of_tokens(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return op(x, weight, labels, **loss.of_whole, bias=bias)

    check_loss(
        of_tokens, lambda *operands: loss.of(F.linear(*operands), labels.cpu()), operands, precision
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


def case_a_bias(device: str) -> None:
    """In chunks of classes, with ranks whose classes are padding, and of tokens."""
    for precision in PRECISIONS[device]:
        for loss in (Loss(70), LOSSES[-1]):
            _check_classwise(50, 16, 3, loss, precision, device, biased=True)
            _check_tokenwise(
                7, 3, Loss(60) if loss.classes else loss, precision, device, biased=True
            )


def case_labels_with_gaps_between_them(device: str) -> None:
    """A column of wider rows, for kernels that read labels side by side."""
    for precision in PRECISIONS[device]:
        x, weight = _operands((7,), 70, precision, device, biased=False)
        labels = labels_of((7, 4), 70, device)[:, 1]
        parts, whole = LinearSoftmaxStats(_tiles(70), 50), LinearCrossEntropy(_tiles(70), 3)
        ways: list[Callable[..., Tensor]] = [
            lambda x, w: joined(lambda _: parts(x, w, labels), labels, 70, 1, PLAIN),  # noqa: B023
            lambda x, w: whole(x, w, labels),  # noqa: B023
        ]
        for way in ways:
            check_loss(
                way,
                lambda x, w: PLAIN.of(F.linear(x, w), labels.cpu()),  # noqa: B023
                [x, weight],
                precision,
            )


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
        _, z, t = LinearSoftmaxStats(TILES, 8064)(x, weight, labels)
        (z + t).sum().backward()
        LinearCrossEntropy(TILES, 1024)(x, weight, labels).backward()
