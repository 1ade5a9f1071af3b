"""Windows to samples: which document each token is of, which labels count, what is masked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.forked_ranks import run_ranks
from scalec.runtime import Batch, Input, Loader, Mesh, Text
from scalec.runtime.data.mixture import Mixture, Part, Stream
from scalec.runtime.data.samples import IGNORED, Windows

VOCAB, MASK, SEPARATOR = 256, 3, 10


def given(made: Windows, *rows: list[int], seed: int = 0) -> dict[str, list[list[int]]]:
    found = made.make_inputs(torch.tensor(rows), list(range(len(rows))), VOCAB, seed)
    return {name: value.tolist() for name, value in found.items()}


def test_without_documents_a_label_is_the_next_token() -> None:
    found = given(Windows(), [5, 10, 7, 8])
    assert (found["tokens"], found["labels"]) == ([[5, 10, 7]], [[10, 7, 8]])


def test_a_separator_is_of_the_document_that_it_ends_and_predicts_nothing() -> None:
    found = given(Windows(separator=10), [5, 10, 7, 8, 10, 10, 9], [10, 1, 2, 3, 4, 5, 10])
    assert found["tokens"] == [[5, 10, 7, 8, 10, 10], [10, 1, 2, 3, 4, 5]]
    assert found["documents"] == [[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]]
    assert found["labels"] == [[10, -100, 8, 10, -100, -100], [-100, 2, 3, 4, 5, 10]]


def test_windows_are_one_longer_where_labels_are_the_next_tokens() -> None:
    assert (Windows().width(8), Windows(masked=0.1, mask_token=3).width(8)) == (9, 8)


# ---- masks

MASKED = Windows(masked=0.15, mask_token=MASK, separator=SEPARATOR)


def masked(
    seed: int = 0, first: int = 0, rows: int = 64, least: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    """Windows of tokens from `least` on, and what becomes of them: tokens and labels."""
    windows = torch.randint(least, VOCAB, (rows, 512), generator=torch.Generator().manual_seed(1))
    found = MASKED.make_inputs(windows, list(range(first, first + rows)), VOCAB, seed)
    assert torch.equal(
        found["documents"], MASKED.make_inputs(windows, [0] * rows, VOCAB, 1)["documents"]
    )
    return windows, found["tokens"], found["labels"]


def test_masks_take_their_shares() -> None:
    windows, tokens, labels = masked()
    predicted = labels != IGNORED
    assert torch.equal(labels[predicted], windows[predicted])
    assert torch.equal(tokens[~predicted], windows[~predicted])
    assert predicted.double().mean().item() == pytest.approx(0.15, abs=0.006)
    hidden = tokens[predicted]
    assert (hidden == MASK).double().mean().item() == pytest.approx(0.8, abs=0.02)
    kept = hidden == windows[predicted]
    assert kept.double().mean().item() == pytest.approx(0.1, abs=0.015)
    drawn = hidden[~kept & (hidden != MASK)]
    assert (drawn.min().item(), drawn.max().item()) == (0, VOCAB - 1)
    assert drawn.double().mean().item() == pytest.approx(VOCAB / 2, rel=0.1)


def test_separators_are_never_hidden_nor_predicted() -> None:
    windows, tokens, labels = masked()
    ends = windows == SEPARATOR
    assert ends.any()
    assert (tokens[ends] == SEPARATOR).all()
    assert (labels[ends] == IGNORED).all()


def test_masks_depend_on_seed_sample_and_position_alone() -> None:
    predicted = masked(least=SEPARATOR + 1)[2] != IGNORED
    for other, same in (
        (masked(least=SEPARATOR + 1)[2], predicted),
        (masked(least=SEPARATOR + 2)[2], predicted),
        (masked(least=SEPARATOR + 1, rows=8)[2], predicted[:8]),
        (masked(least=SEPARATOR + 1, first=1, rows=63)[2], predicted[1:]),
    ):
        assert torch.equal(other != IGNORED, same)
    assert not torch.equal(predicted[:-1], predicted[1:])
    assert not torch.equal(masked(least=SEPARATOR + 1, seed=1)[2] != IGNORED, predicted)


# ---- on ranks

SEQ, ROWS = 8, 8
LAYOUT = Input(("seq", "batch"), {"batch": ("dp",), "seq": ("tp",)})


def _batches(file: str, made: Text, shape: dict[str, int]) -> list[Batch]:
    inputs = {"tokens": LAYOUT, "labels": LAYOUT, "documents": LAYOUT}
    stream = Stream([file], torch.uint8, made.width(SEQ))
    loader = Loader(Mixture([Part("", stream)]), made, inputs, Mesh(shape), ROWS, 2, VOCAB, seed=3)
    return [loader.batch(step) for step in range(3)]


@pytest.mark.parametrize("options", [{}, {"masked": 0.5, "mask_token": MASK}])
def test_a_step_is_the_same_on_any_mesh(options: dict[str, Any], tmp_path: Path) -> None:
    """Over more than one pass: the same window is masked otherwise in each."""
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    made = Text((str(file),), separator=SEPARATOR, **options)
    (alone,) = run_ranks(1, _batches, str(file), made, {"dp": 1, "tp": 1})
    ranks = run_ranks(4, _batches, str(file), made, {"dp": 2, "tp": 2})
    for step, whole in enumerate(alone):
        for name in ("tokens", "labels", "documents"):
            parts = [getattr(rank[step], name) for rank in ranks]
            rows = [torch.cat(parts[dp : dp + 2], 1) for dp in (0, 2)]
            assert torch.equal(torch.cat(rows, 2), getattr(whole, name))
    assert [x.shape for x in next(alone[0].microbatches())] == [(SEQ, ROWS // 2)] * 3
