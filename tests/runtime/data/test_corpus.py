"""A corpus opened: files of other formats are refused, and a part of a single file is held out
at a window.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.forked_ranks import run_ranks
from scalec.runtime import Input, Loader, Mesh, RunError, Text, Tokens
from scalec.runtime.data import vocabulary
from scalec.runtime.data.corpus import DataSet, holdout_lines, open_corpus
from scalec.runtime.data.mixture import Mixture
from scalec.runtime.data.vocabulary import check_ids

SEQ = 8
WIDTH = SEQ + 1


def _windows(mixture: Mixture | None) -> list[bytes]:
    """All windows of a mixture of one set, in the order of the file."""
    assert mixture is not None
    (part,) = mixture.parts
    return [bytes(part.stream.window(number).tolist()) for number in range(part.stream.windows)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 50 windows and some bytes more, each window another."""
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(number // WIDTH for number in range(50 * WIDTH + 3)))
    return path


def test_the_last_part_of_a_single_file_is_held_out(path: Path) -> None:
    training, held = open_corpus(Text((str(path),), holdout=0.2), (), SEQ)
    assert _windows(training) == [bytes([number] * WIDTH) for number in range(40)]
    assert _windows(held) == [bytes([number] * WIDTH) for number in range(40, 50)]
    assert holdout_lines(held) == [
        f"validation: the last 10 sequences of {path}, of 50; training never sees them",
    ]


@settings(max_examples=60, deadline=None)
@given(windows=st.integers(2, 40), rest=st.integers(0, WIDTH - 1), holdout=st.floats(0.001, 0.999))
def test_each_window_is_trained_on_or_held_out(
    windows: int, rest: int, holdout: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("data") / "one.bin"
    np.arange(windows * WIDTH + rest, dtype=np.uint16).tofile(path)
    training, held = open_corpus(Tokens((str(path),), holdout=holdout), (), SEQ)
    assert held is not None
    streams = training.parts[0].stream, held.parts[0].stream
    starts = [
        int(stream.window(number)[0]) for stream in streams for number in range(stream.windows)
    ]
    assert starts == [WIDTH * number for number in range(windows)]
    assert streams[1].windows == min(max(1, round(holdout * windows)), windows - 1)


def test_nothing_is_held_out_where_nothing_is_asked_for(path: Path) -> None:
    training, held = open_corpus(Text((str(path),), holdout=0.0), (), SEQ)
    assert held is None
    assert len(_windows(training)) == 50


def test_files_in_place_of_the_plans_are_held_out_of_too(path: Path) -> None:
    sets = (DataSet("a", ("nothing/*",)),)
    training, held = open_corpus(Text(sets=sets, holdout=0.1), (str(path),), SEQ)
    assert (len(_windows(training)), len(_windows(held))) == (45, 5)


def test_one_window_cannot_be_shared(path: Path) -> None:
    path.write_bytes(bytes(WIDTH))
    with pytest.raises(RunError, match="too little data to hold a part of it out"):
        open_corpus(Text((str(path),), holdout=0.2), (), SEQ)


def test_sets_of_one_file_share_no_window(path: Path, tmp_path: Path) -> None:
    """Two sets may have one file, if one does not train on what the other holds out."""
    one, whole = DataSet("a", (str(path),), holdout=0.2), DataSet("b", (str(path),), holdout=0.2)
    assert open_corpus(Text(sets=(one, whole)), (), SEQ)[1] is not None
    for other in (replace(whole, holdout=0.1), replace(whole, holdout=0.0)):
        with pytest.raises(RunError, match="is held out of the set a and trained on in b"):
            open_corpus(Text(sets=(one, other)), (), SEQ)


def _tokens(path: str, split: dict[str, tuple[str, ...]], steps: int) -> list[list[int]]:
    corpus = Text((path,), holdout=0.2)
    training, _ = open_corpus(corpus, (), SEQ)
    layout = Input(("batch", "seq"), split)
    mesh = Mesh({axis: 2 for axes in split.values() for axis in axes})
    loader = Loader(training, corpus, {"tokens": layout, "labels": layout}, mesh, 8, 1, 256, seed=0)
    return [loader.batch(step).tokens.flatten().tolist() for step in range(steps)]


def test_training_never_sees_what_is_held_out_on_any_mesh(path: Path) -> None:
    """Ten windows of fifty are held out; eight steps of eight samples pass over the others more
    than once.
    """
    alone = _tokens(str(path), {}, 8)
    ranks = run_ranks(2, _tokens, str(path), {"batch": ("dp",)}, 8)
    seen = {token for step in alone for token in step}
    assert seen == {*range(40)}
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == [sorted(step) for step in alone]


# ---- other formats


def test_a_file_of_another_format_is_refused_unless_it_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    np.save(path, np.arange(1000))
    plain = tmp_path / "plain.bin"
    np.arange(1000, dtype=np.uint16).tofile(plain)
    corpus = Tokens((str(path), str(plain)), holdout=0.0)
    with pytest.raises(RunError) as refused:
        open_corpus(corpus, (), SEQ)
    line, *remedy = str(refused.value).splitlines()
    assert line == f"{path} is a NumPy array (.npy), not raw token ids of uint16"
    assert remedy[1:3] == [
        "  import numpy",
        f'  numpy.load({str(path)!r}).astype("uint16").tofile("corpus.bin")',
    ]
    assert "--data-as-is" in remedy[-1]
    meant, _ = open_corpus(replace(corpus, as_is=True), (), SEQ)
    unlooked, _ = open_corpus(corpus, (), SEQ, looks=False)
    assert meant.samples == unlooked.samples > 0, "one rank of a node looks"


@pytest.mark.parametrize(
    "pattern", ["hf://datasets/a/b", "https://a.org/b.txt", "s3://bucket/a.bin"]
)
def test_an_address_is_no_path(pattern: str) -> None:
    with pytest.raises(RunError, match=f"`{pattern}` is an address"):
        open_corpus(Text((pattern,)), (), SEQ)


# ---- the vocabulary


def _ids(folder: Path, count: int, **others: int) -> Tokens:
    """Two files of ids below 100, with another id at some places of the second."""
    ids = np.random.default_rng(0).integers(0, 100, (2, count)).astype(np.uint16)
    for place, value in others.items():
        ids[1, int(place.removeprefix("at_"))] = value
    for name, row in zip("ab", ids, strict=True):
        row.tofile(folder / f"{name}.bin")
    return Tokens((str(folder / "*.bin"),), holdout=0.0)


def test_an_id_beyond_the_vocabulary_is_named_before_the_first_step(tmp_path: Path) -> None:
    training, _ = open_corpus(_ids(tmp_path, 3000, at_1234=100), (), SEQ)
    check_ids([training], 101, 0, 1)
    said = (
        f"{tmp_path}/b.bin: token 1,234, at byte 2,468, has token id 100, and the plan's vocab"
        " is 100"
    )
    with pytest.raises(RunError, match=f"^{re.escape(said)}\n"):
        check_ids([training], 100, 0, 1)


def test_ranks_together_look_at_all_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "PIECE", 64)
    training, _ = open_corpus(_ids(tmp_path, 3000, at_2999=500), (), SEQ)
    found = list[int]()
    for rank in range(4):
        try:
            check_ids([training], 100, rank, 4)
        except RunError:
            found.append(rank)
    assert len(found) == 1


def test_of_large_data_a_sample_is_looked_at_with_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "PIECE", 64)
    monkeypatch.setattr(vocabulary, "MOST", 5)
    reads = list[int]()
    training, _ = open_corpus(_ids(tmp_path, 3000, at_2999=500), (), SEQ)
    stream = training.parts[0].stream
    read = stream.read
    monkeypatch.setattr(stream, "read", lambda *place: reads.append(place[0]) or read(*place))
    with pytest.raises(RunError, match=r"token 2,999, at byte 5,998"):
        check_ids([training], 100, 0, 1)
    assert reads == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32])
def test_the_step_that_would_train_on_it_names_the_same_place(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    ids = np.arange(90 * WIDTH) % 100
    ids[333] = ids[85 * WIDTH + 2] = 60_000
    ids.astype(str(dtype).removeprefix("torch.")).tofile(tmp_path / "a.bin")
    corpus = Tokens((str(tmp_path / "a.bin"),), dtype=dtype, holdout=0.1)
    layout = Input(("batch", "seq"), {})
    for mixture, token in zip(open_corpus(corpus, (), SEQ), (333, 85 * WIDTH + 2), strict=True):
        assert mixture is not None
        rows = mixture.parts[0].stream.windows
        loader = Loader(
            mixture, corpus, {"tokens": layout, "labels": layout}, Mesh({}), rows, 1, 100, seed=3
        )
        place = token * dtype.itemsize
        with pytest.raises(
            RunError, match=rf"a\.bin: token {token}, at byte {place:,}, has token id 60,000"
        ):
            loader.batch(0)


def test_a_vocabulary_that_all_ids_are_below_needs_no_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = open_corpus(_ids(tmp_path, 3000), (), SEQ)
    monkeypatch.setattr(training.parts[0].stream, "read", None)
    check_ids([training], 65_536, 0, 1)
