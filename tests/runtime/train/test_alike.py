"""Ranks that are not alike are told before their first step, with what differs."""

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.forked_ranks import run_ranks
from scalec.runtime import RunError
from scalec.runtime.train.alike import alike, differences


def test_who_has_which_value() -> None:
    old, new = {"torch": "2.11.0", "--seed": "0"}, {"torch": "2.13.0", "--seed": "0"}
    assert differences([([0, 1, 2, 3, 4, 6, 7], new), ([5], old)]) == [
        "rank 5 has torch 2.11.0, ranks 0-4, 6-7 have 2.13.0"
    ]
    three = [([0, 3], {"a": "1"}), ([1], {"a": "2"}), ([2], {})]
    assert differences(three) == ["rank 1 has a 2, rank 2 has none, ranks 0, 3 have 1"]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_all_ranks_are_named_once(values: list[str]) -> None:
    found = [([rank], {"x": value}) for rank, value in enumerate(values)]
    told = differences(found)
    if len({*values}) == 1:
        assert told == []
        return
    (line,) = told
    ranks = [
        rank
        for each in line.replace(" have", " has").split("rank")[1:]
        for rank in _read(each.partition(" has")[0])
    ]
    assert sorted(ranks) == [*range(len(values))]


def _read(words: str) -> list[int]:
    spans = [each.split("-") for each in words.removeprefix("s").strip().split(", ")]
    return [rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)]


def get_error(unlike: bool) -> str:
    rank = dist.get_rank()
    try:
        alike({"train.py": "sha256 0", "--seed": str(int(unlike and rank == 1))})
    except RunError as error:
        return str(error)
    return ""


def test_all_ranks_are_told_alike() -> None:
    assert run_ranks(3, get_error, False) == [""] * 3
    (told,) = {*run_ranks(3, get_error, True)}
    assert told.splitlines()[1] == "  rank 1 has --seed 1, ranks 0, 2 have 0"
