"""Folders of `scalec data` as data: which labels count, and where documents begin, in each window."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scalec.formats.token_folder import (
    INDEX,
    Recipe,
    Shard,
    TokenFolder,
    file_hash,
    shard_file,
)
from scalec.runtime import Folder, Input, Loader, Mesh, RunError
from scalec.runtime.data import folder as data_folder
from scalec.runtime.data.corpus import open_corpus
from scalec.runtime.data.samples import IGNORED, Marks

Document = Sequence[bool]
"""Whether each token of a document counts."""


def write_folder(
    folder: Path, shards: Sequence[Sequence[Document]], vocab: int = 500, tokenizer: str = "a"
) -> Path:
    """A folder of documents whose ids count up from 0 over all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    first, written = 0, list[Shard]()
    masked = any(not all(document) for shard in shards for document in shard)
    for number, documents in enumerate(shards):
        counted = [counts for document in documents for counts in document]
        lengths = [len(document) for document in documents]
        starts = np.cumsum([0, *lengths])[: len(documents)]
        files: dict[str, np.ndarray[Any, Any]] = {
            "tokens": (np.arange(len(counted)) + first).astype("<u2" if vocab < 65536 else "<u4"),
            "documents": starts.astype("<u8"),
        }
        if masked:
            files["counts"] = np.packbits(np.array(counted, dtype=bool), bitorder="little")
        for kind, values in files.items():
            values.tofile(folder / shard_file(kind, number))
        hashes = {kind: file_hash(folder / shard_file(kind, number)) for kind in files}
        written.append(Shard(len(counted), len(documents), sum(counted), hashes))
        first += len(counted)
    recipe = Recipe(tokenizer, "", "--field text", vocab, None, None, masked, False, False)
    (folder / INDEX).write_text(TokenFolder(recipe, (), tuple(written), {}).to_json())
    return folder


DOCUMENTS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


@given(shards=st.lists(DOCUMENTS, min_size=1, max_size=3), seq=st.integers(1, 9))
def test_a_label_counts_if_its_token_does_and_begins_no_document(
    shards: list[list[list[bool]]], seq: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_folder(tmp_path_factory.mktemp("data"), shards)
    documents = [document for shard in shards for document in shard]
    counts = [flag for document in documents for flag in document]
    owners = [number for number, document in enumerate(documents) for _ in document]
    if len(counts) <= seq:
        return
    corpus = Folder((str(folder),), holdout=0)
    (part,) = open_corpus(corpus, (), seq)[0].parts
    assert part.stream.windows == len(counts) // (seq + 1)
    for number in range(part.stream.windows):
        start = number * (seq + 1)
        windows = part.stream.window(number)[None]
        marks = part.stream.marks(number)
        assert marks is not None
        inputs = corpus.make_inputs(windows, [number], 500, 0, Marks.stack([marks]))
        assert inputs["tokens"].tolist() == [[*range(start, start + seq)]]
        labels = list[int]()
        for token in range(start + 1, start + seq + 1):
            counted = counts[token] and owners[token] == owners[token - 1]
            labels.append(token if counted else IGNORED)
        assert inputs["labels"].tolist() == [labels]
        expected = [owners[token] - owners[start] for token in range(start, start + seq)]
        assert inputs["documents"].tolist() == [expected]


def test_without_a_mask_all_tokens_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [[[True] * 20, [True] * 12]])
    assert not (folder / shard_file("counts", 0)).exists()
    corpus = Folder((str(folder),), holdout=0)
    training, _ = open_corpus(corpus, (), 31)
    marks = training.marks(0, 0)
    assert marks is not None
    assert marks.counted.all()
    assert marks.begins.nonzero().flatten().tolist() == [0, 20]


def test_a_mask_that_the_index_does_not_know_is_not_read(tmp_path: Path) -> None:
    """A run that was killed left it, and another made the folder without a mask."""
    folder = write_folder(tmp_path / "a", [[[True] * 32]])
    (folder / shard_file("counts", 0)).write_bytes(bytes(4))
    training, _ = open_corpus(Folder((str(folder),), holdout=0), (), 31)
    marks = training.marks(0, 0)
    assert marks is not None
    assert marks.counted.all()
    assert not [path for path in training.parts[0].stream.read_files if "counts" in path]


def test_shards_are_held_out_as_files_are(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [[[True] * 8]] * 10)
    training, held = open_corpus(Folder((str(folder),), holdout=0.2), (), 7)
    assert held is not None
    assert (training.parts[0].stream.windows, held.parts[0].stream.windows) == (8, 2)


def test_a_batch_has_the_marks_of_its_rows(tmp_path: Path) -> None:
    documents = [[False, True, True], [True] * 5] * 8
    folder = write_folder(tmp_path / "a", [documents])
    corpus = Folder((str(folder),), holdout=0)
    training, _ = open_corpus(corpus, (), 7)
    layouts = {name: Input(("batch", "seq"), {}) for name in ("tokens", "labels", "documents")}
    loader = Loader(training, corpus, layouts, Mesh({"dp": 1}), 4, 2, 500, 0)
    batch = loader.batch(0)
    assert batch.documents is not None
    assert batch.labels.shape == (2, 2, 7)
    for tokens, labels, owners in zip(
        batch.tokens.flatten(0, 1), batch.labels.flatten(0, 1), batch.documents.flatten(0, 1),
        strict=True,
    ):  # fmt: skip
        first = int(tokens[0])
        assert first % 8 == 0
        assert labels.tolist() == [first + 1, first + 2, IGNORED, *range(first + 4, first + 8)]
        assert owners.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_what_ranks_compare_tells_marks_apart() -> None:
    windows = torch.tensor([[5, 6]])
    seen = set[tuple[int, ...]]()
    for counted in ([True, True], [True, False]):
        for begins in ([True, False], [True, True]):
            marks = Marks(torch.tensor([counted]), torch.tensor([begins]))
            seen.add(tuple(marks.with_tokens(windows)[0].tolist()))
    assert len(seen) == 4


def _without_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def _cut_tokens(folder: Path) -> None:
    path = folder / shard_file("tokens", 0)
    path.write_bytes(path.read_bytes()[:-2])


def _without_counts(folder: Path) -> None:
    (folder / shard_file("counts", 0)).unlink()


def _other_format(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "format": 2}))


def _flip_a_bit_of(kind: str, folder: Path) -> None:
    path = folder / shard_file(kind, 0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["tokens", "counts", "documents"])
def test_a_changed_bit_of_any_file_is_found_before_the_first_step(
    kind: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "a", [[[True, False] * 10]])
    _flip_a_bit_of(kind, folder)
    with pytest.raises(RunError, match=f"{kind}-00000.bin has changed since `scalec data`"):
        open_corpus(Folder((str(folder),)), (), 4)
    open_corpus(Folder((str(folder),)), (), 4, looks=False)


def test_of_a_large_folder_some_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(tmp_path / "a", [[[True] * 8]] * 9)
    read = list[str]()

    def count(path: str) -> str:
        read.append(path)
        return file_hash(path)

    monkeypatch.setattr(data_folder, "file_hash", count)
    open_corpus(Folder((str(folder),)), (), 4)
    assert len(read) == 18
    read.clear()
    monkeypatch.setattr(data_folder, "MOST_HASHED", 100)  # of 9 x (16 + 8) bytes
    open_corpus(Folder((str(folder),)), (), 4)
    assert len(read) == 6


def _of_pairs(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["recipe"]["pair"] = True
    (folder / INDEX).write_text(json.dumps(index))


SPOILT = {
    _of_pairs: "has pairs of chosen and rejected answers, and no loss takes pairs yet",
    _without_index: "has no index.json: `scalec data` writes it when all tokens are there",
    _cut_tokens: "has 38 bytes, and .*index.json says 40",
    _without_counts: "cannot read .*counts-00000.bin: No such file",
    _other_format: "has format 2, and this scalec reads 1",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_folder_that_is_not_whole_is_refused(spoil: Any, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", [[[True, False] * 10]])
    spoil(folder)
    with pytest.raises(RunError, match=SPOILT[spoil]):
        open_corpus(Folder((str(folder),)), (), 4)


def test_a_folder_that_is_not_there_and_two_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="`nowhere` is no folder, looked for in"):
        open_corpus(Folder(("nowhere",)), (), 4)
    one = write_folder(tmp_path / "a", [[[True] * 20]])
    other = write_folder(tmp_path / "b", [[[True] * 20]], tokenizer="b")
    with pytest.raises(RunError, match="have tokens of two tokenizers"):
        open_corpus(Folder((str(one), str(other)), holdout=0), (), 4)
