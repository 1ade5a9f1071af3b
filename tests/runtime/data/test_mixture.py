"""Mixtures: proportions, passes, and that a sample depends on nothing but seed and number."""

import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.forked_ranks import run_ranks
from scalec.runtime import DataSet, Input, Loader, Mesh, RunError, Text
from scalec.runtime.data.corpus import open_corpus, repetition_lines, shortage_problem
from scalec.runtime.data.mixture import Mixture
from scalec.runtime.data.order import LONGEST, Interleaving, spread, whole_weights

SEQ, BATCH, SEED = 4, 8, 3
weights = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(weights)
def test_sets_are_spread_to_within_one_of_their_due(given: list[int]) -> None:
    """The bound is Tijdeman's."""
    counts, total, most = [0] * len(given), sum(given), 1 - 1 / max(1, 2 * len(given) - 2)
    for number, which in enumerate(spread(given), 1):
        counts[which] += 1
        off = max(
            abs(count - number * weight / total)
            for count, weight in zip(counts, given, strict=True)
        )
        assert off <= most + 1e-9
    assert counts == given


@given(weights, st.integers(0, 2**63), st.integers(0, 5))
def test_turns_number_the_samples_of_each_set(given: list[int], seed: int, cycles: int) -> None:
    """Each set's numbers count up from 0; whole cycles have every set as often as its weight
    says.
    """
    turns, total, seen = Interleaving(given), sum(given), Counter[int]()
    for sample in range(cycles * total):
        which, number = turns.at(sample, seed)
        assert number == seen[which]
        seen[which] += 1
        due = [(sample + 1) * weight / total for weight in given]
        assert all(abs(seen[each] - share) < 2 for each, share in enumerate(due))
    assert [seen[each] for each in range(len(given))] == [cycles * weight for weight in given]


def test_a_row_of_a_batch_is_not_always_of_one_set() -> None:
    turns = Interleaving([3, 1])
    assert {turns.at(8 * step, SEED)[0] for step in range(20)} == {0, 1}


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6))
def test_weights_are_kept_to_a_part_of_their_sum(given: list[float]) -> None:
    whole = whole_weights(given)
    assert all(weight >= 1 for weight in whole)
    assert sum(whole) <= LONGEST
    for weight, kept in zip(given, whole, strict=True):
        assert abs(kept / sum(whole) - weight / sum(given)) <= (len(given) + 1) / LONGEST


def test_weights_of_a_few_digits_are_exact() -> None:
    assert whole_weights([0.7, 0.3]) == [7, 3]
    assert whole_weights([3.0, 1.0]) == [3, 1]


def _corpus(folder: Path, weights: tuple[float, float] = (3, 1), holdout: float = 0.0) -> Text:
    """Sets of 24 and of 6 windows; the bytes of the first are below 128."""
    for name, start, windows in (("low", 0, 24), ("high", 128, 6)):
        for part in range(2):
            path = folder / f"{name}{part}.bin"
            path.write_bytes(
                bytes(start + (i // (SEQ + 1)) + 50 * part for i in range((SEQ + 1) * windows // 2))
            )
    sets = (
        DataSet(name, (f"{folder}/{name}*",), each, holdout)
        for name, each in zip(("low", "high"), weights, strict=True)
    )
    return Text(sets=(*sets,), holdout=holdout)


def _rows(
    corpus: Text, mesh: dict[str, int], microbatches: int, steps: range
) -> list[list[list[int]]]:
    """The first token of each of this rank's rows, by microbatch and step."""
    training, _ = open_corpus(corpus, (), SEQ)
    layout = Input(("batch", "seq"), {"batch": (*mesh,)})
    loader = Loader(
        training,
        corpus,
        {"tokens": layout, "labels": layout},
        Mesh(mesh),
        BATCH,
        microbatches,
        256,
        SEED,
    )
    return [[rows[:, 0].tolist() for rows in loader.batch(step).tokens] for step in steps]


def test_a_mixture_is_the_same_on_any_number_of_ranks_and_from_any_step(tmp_path: Path) -> None:
    corpus, steps = _corpus(tmp_path), 12
    alone = [[*chain(*rows)] for rows in _rows(corpus, {}, 2, range(steps))]
    assert [[*chain(*rows)] for rows in _rows(corpus, {}, 1, range(5, steps))] == alone[5:]
    for ranks in (2, 4):
        found = run_ranks(ranks, _rows, corpus, {"dp": ranks}, 2, range(steps))
        for step in range(steps):
            assert [*chain(*(rank[step][m] for m in range(2) for rank in found))] == alone[step]
    assert all(sum(token >= 128 for token in rows) == 2 for rows in alone)  # of 8


def test_each_set_is_reshuffled_at_each_of_its_passes(tmp_path: Path) -> None:
    rows = [
        token
        for step in _rows(_corpus(tmp_path), {}, 1, range(12))
        for rows in step
        for token in rows
    ]
    low, high = [token for token in rows if token < 128], [token for token in rows if token >= 128]
    for tokens, windows in ((low, 24), (high, 6)):
        passes = [tokens[at : at + windows] for at in range(0, len(tokens), windows)]
        assert len(passes) >= 3
        assert all(sorted(each) == sorted(passes[0]) for each in passes)
        assert len({tuple(each) for each in passes}) == len(passes)


def test_repeated_sets_are_told(tmp_path: Path) -> None:
    training, held = open_corpus(_corpus(tmp_path), (), SEQ)
    assert held is None
    assert repetition_lines(training, 1, BATCH) == []
    assert repetition_lines(training, 10, BATCH) == [
        "low is seen 2.5 times in 10 steps",
        "high is seen 3.3 times in 10 steps",
    ]
    assert (
        shortage_problem(training, 32)
        == "high: 30 tokens make 6 sequences of 5, fewer than the 8 of a global batch"
    )
    alone, _ = open_corpus(_corpus(tmp_path), (f"{tmp_path}/high*",), SEQ)  # in place of the sets
    assert repetition_lines(alone, 3, BATCH) == ["the data is seen 4.0 times in 3 steps"]
    assert alone.samples == 6
    assert training.samples == 24  # `high` is through when 18 of `low` have been seen


def test_each_set_holds_out_files_of_its_own(tmp_path: Path) -> None:
    training, held = open_corpus(_corpus(tmp_path, holdout=0.5), (), SEQ)
    assert held is not None
    assert [part.name for part in held.parts] == ["low", "high"]
    paths = [path for each in (training, held) for part in each.parts for path in part.stream.files]
    assert len({*paths}) == len(paths) == 4


def test_a_file_to_validate_with_is_not_trained_on_in_another_set(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path)
    sets = (DataSet("all", (f"{tmp_path}/*",)), DataSet("low", (f"{tmp_path}/low*",), holdout=0.5))
    with pytest.raises(
        RunError, match=r"low\d.bin is held out of the set low and trained on in all"
    ):
        open_corpus(Text(sets=sets), (), SEQ)
    (tmp_path / "tiny").write_bytes(b"abc")
    with pytest.raises(RunError, match="set tiny: too little data: 3 tokens in 1 file"):
        open_corpus(Text(sets=(*corpus.sets, DataSet("tiny", (f"{tmp_path}/tiny",)))), (), SEQ)


def test_a_mixture_of_one_set_is_dealt_like_files_alone(tmp_path: Path) -> None:
    """Names decide the order, so that two sets of one size are not in step."""
    training, _ = open_corpus(_corpus(tmp_path, (1, 1)), (), SEQ)
    low = training.parts[0]
    named = [Mixture([low]).window(n, SEED).tolist() for n in range(24)]
    assert sorted(named) == sorted(Mixture([low]).window(n, SEED + 1).tolist() for n in range(24))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.write_bytes(b"a"), "(30 bytes then, 1 now)"),
        (lambda path: path.write_bytes(bytes(31)), "(30 bytes then, 31 now)"),
        # as writing does, in another tick,
        (lambda path: os.utime(path, ns=(0, 0)), "(30 bytes, written to since)"),
    ],
)
def test_a_file_that_changes_is_named(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(30)))
    training, _ = open_corpus(Text((str(path),), holdout=0.0), (), SEQ)
    training.window(0, SEED)
    change(path)
    with pytest.raises(
        RunError, match=f"^{re.escape(f'{path} is not as it was when the run began {said}')}"
    ):
        [training.window(n, SEED) for n in range(6)]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(30))
    training, _ = open_corpus(Text((str(path),), holdout=0.0), (), SEQ)
    path.unlink()
    with pytest.raises(
        RunError, match=f"^cannot read {re.escape(str(path))}: No such file or directory$"
    ):
        training.window(0, SEED)
