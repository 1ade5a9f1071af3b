"""Cross entropy of logits, whole and of several ranks, against torch's own."""

from collections.abc import Callable

import torch
from torch import Tensor

from helpers.kernels.cases import PRECISIONS, Precision, check_equal, moved, randn
from helpers.kernels.losses import LOSSES, PLAIN, Loss, check_loss, joined, labels_of
from scalec.runtime.kernels import CrossEntropy, LogitSoftmaxStats, Tile

SIZES = [(5, 1), (1, 7), (7, 127), (3, 256), (4, 300), (0, 8)]
"""Rows and columns: less than a block, one, several and a tail."""


def _tiles(columns: int) -> dict[int, Tile]:
    return {columns: Tile(rows=1, warps=4, columns=128)}


def _check_whole(logits: Tensor, loss: Loss, precision: Precision) -> None:
    columns = logits.shape[-1]
    labels = labels_of(logits.shape[:-1], loss.classes or columns, str(logits.device))
    op = CrossEntropy(_tiles(columns))
    check_loss(
        lambda x: op(x, labels, **loss.of_whole),
        lambda x: loss.of(x, labels.cpu()),
        [logits],
        precision,
    )


def _check_ranks(columns: int, world: int, loss: Loss, precision: Precision, device: str) -> None:
    """Each rank has `columns` of the vocabulary."""
    logits = randn(2, 3, columns * world, precision=precision, device=device)
    labels = labels_of((2, 3), loss.classes or columns * world, device)
    op = LogitSoftmaxStats(_tiles(columns))

    def of_ranks(x: Tensor) -> Tensor:
        slices = x.chunk(world, -1)
        return joined(
            lambda axis: op(slices[axis.rank], labels, axis, **loss.of_parts),
            labels,
            columns,
            world,
            loss,
        )

    check_loss(of_ranks, lambda x: loss.of(x, labels.cpu()), [logits], precision)


def case_sizes(device: str) -> None:
    for precision in PRECISIONS[device]:
        for rows, columns in SIZES:
            _check_whole(randn(rows, columns, precision=precision, device=device), PLAIN, precision)


def case_smoothing_z_loss_and_cap(device: str) -> None:
    for precision in PRECISIONS[device]:
        for loss in LOSSES:
            _check_whole(randn(2, 3, 200, precision=precision, device=device), loss, precision)


def case_padding(device: str) -> None:
    """Its gradient is zero, whatever it holds."""
    for precision in PRECISIONS[device]:
        for classes in (1, 128, 150, 199):
            logits = randn(4, 200, precision=precision, device=device)
            with torch.no_grad():
                logits[:, classes:] = 1e4
            _check_whole(logits, Loss(classes, smoothing=0.1, cap=5.0), precision)


def case_ranks_together(device: str) -> None:
    for precision in PRECISIONS[device]:
        for world in (2, 3):
            _check_ranks(70, world, LOSSES[-1], precision, device)


def case_ranks_whose_classes_are_all_padding(device: str) -> None:
    for precision in PRECISIONS[device]:
        for classes in (1, 30, 31, 60):
            _check_ranks(30, 4, Loss(classes, smoothing=0.1, z=0.01), precision, device)


def case_logits_that_are_not_contiguous(device: str) -> None:
    """Slices of wider rows, which are read as they lie, and transposed ones, which are copied."""
    for precision in PRECISIONS[device]:
        wide = randn(4, 3, 160, precision=precision, device=device)
        for logits in (wide[..., 9:140], wide.transpose(0, 1), wide[..., ::2], wide[1:, 1:]):
            _check_whole(logits, PLAIN, precision)


def case_logits_that_begin_anywhere(device: str) -> None:
    for precision in PRECISIONS[device]:
        _check_whole(
            moved(randn(4, 512, precision=precision, device=device)), LOSSES[-1], precision
        )


def case_labels_with_gaps_between_them(device: str) -> None:
    """A column of wider rows, and rows that are columns, whole and in parts."""
    for precision in PRECISIONS[device]:
        logits = randn(4, 3, 70, precision=precision, device=device)
        whole, parts = CrossEntropy(_tiles(70)), LogitSoftmaxStats(_tiles(70))
        for labels in (labels_of((4, 3, 2), 70, device)[..., 1], labels_of((3, 4), 70, device).T):
            ways: list[Callable[[Tensor], Tensor]] = [
                lambda x: whole(x, labels),  # noqa: B023
                lambda x: joined(lambda _: parts(x, labels), labels, 70, 1, PLAIN),  # noqa: B023
            ]
            for way in ways:
                check_loss(way, lambda x: PLAIN.of(x, labels.cpu()), [logits], precision)  # noqa: B023


def case_logits_far_from_zero(device: str) -> None:
    """Only their differences count; what is far below the largest has no probability."""
    for precision in PRECISIONS[device]:
        logits = randn(6, 300, precision=precision, device=device).detach()
        logits[0:2], logits[2:4], logits[4, 7:], logits[5] = (
            logits[0:2] + 3e4,
            logits[2:4] - 3e4,
            -torch.inf,
            0.0,
        )
        labels = torch.tensor([0, 299, 5, 128, 3, 0], device=device)
        logits.requires_grad_()
        op = CrossEntropy(_tiles(300))
        check_loss(
            lambda x: op(x, labels),  # noqa: B023
            lambda x: PLAIN.of(x, labels.cpu()),  # noqa: B023
            [logits],
            precision,
        )


def case_tokens_without_a_label_have_no_gradient(device: str) -> None:
    for precision in PRECISIONS[device]:
        logits = randn(3, 200, precision=precision, device=device)
        labels = torch.full((3,), -1, device=device)
        loss = CrossEntropy(_tiles(200))(logits, labels, smoothing=0.1, z=0.01)
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss.item() == 0
        check_equal(
            gradient, torch.zeros(3, 200, dtype=torch.float64), precision._replace(atol=0, rtol=0)
        )


def case_rows_beyond_what_32_bits_count(device: str) -> None:
    """The last of them is as if it were alone.

    Under the interpreter there is no room for so many.
    """
    rows, columns = (2**16 + 1, 2**15) if device == "cuda" else (2, 2**10)
    op = CrossEntropy({columns: Tile(rows=1, warps=8, columns=4096 if device == "cuda" else 512)})
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    logits = torch.zeros(rows, columns, dtype=dtype, device=device)
    logits[-1, :3] = torch.tensor([1.0, 2.0, 4.0])
    labels = torch.full((rows,), -1, device=device)
    labels[-1] = columns - 1
    logits.requires_grad_()
    check = Precision(dtype, 8e-3, 1.6e-2)
    last = logits[-1:].detach().to("cpu", torch.float64).requires_grad_()
    right, loss = PLAIN.of(last, labels[-1:].cpu()), op(logits, labels)
    check_equal(loss, right, check._replace(dtype=torch.float32, rtol=1e-5))
    (gradient,), (expected,) = torch.autograd.grad(loss, logits), torch.autograd.grad(right, last)
    check_equal(gradient[-1:], expected, check)
    assert not gradient[:-1].any()


TILES = {
    columns: Tile(rows=1, warps=8, columns=4096) for columns in (128256, 32064, 16032, 50304, 256)
}


def examples(device: str, dtype: torch.dtype) -> None:
    """Vocabularies of Llama 3, whole and over 4 and 8 ranks, of GPT-2 with padding, and of a
    small model.
    """
    for columns in TILES:
        logits = torch.empty(1024, columns, device=device, dtype=dtype, requires_grad=True)
        labels = torch.empty(1024, device=device, dtype=torch.int64)
        for loss in (PLAIN, Loss(columns - 47), Loss(smoothing=0.1, cap=30.0)):
            CrossEntropy(TILES)(logits, labels, **loss.of_whole).backward()
