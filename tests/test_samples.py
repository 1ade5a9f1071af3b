"""The cases that `make test` runs of a sampled test: few, always the same, and with as many
values as can be.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.samples import outside_of_samples, sample


def _cases(test: str, *counts: int, marks: tuple[pytest.Mark, ...] = ()) -> list[pytest.Item]:
    """A case for each combination of so many values of parameters."""
    return [
        cast(pytest.Item, _Case(test, indices, marks)) for indices in product(*map(range, counts))
    ]


class _Case:
    def __init__(self, test: str, indices: tuple[int, ...], marks: tuple[pytest.Mark, ...]) -> None:
        self.nodeid = f"tests/test_x.py::{test}[{'-'.join(map(str, indices))}]"
        self.callspec = SimpleNamespace(params={f"p{i}": index for i, index in enumerate(indices)})
        self._marks = {mark.name: mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self._marks.get(name)


def _indices(cases: list[pytest.Item]) -> list[dict[str, int]]:
    return [cast(Any, case).callspec.params for case in cases]


def test_each_value_of_each_parameter_is_in_a_sample_of_as_many_as_the_longest_has() -> None:
    chosen = _indices(sample(_cases("test_a", 3, 5, 2), 5))
    assert {each["p0"] for each in chosen} == {*range(3)}
    assert {each["p1"] for each in chosen} == {*range(5)}
    assert {each["p2"] for each in chosen} == {*range(2)}


def test_a_sample_does_not_depend_on_order() -> None:
    cases = _cases("test_a", 20)
    assert {*_ids(sample(cases, 4))} == {*_ids(sample(cases[::-1], 4))}
    assert {*_ids(sample(cases, 4))} != {*_ids(sample(_cases("test_b", 20), 4))}


def test_the_others_are_left_for_long_runs() -> None:
    few, long = pytest.mark.sample(2).mark, pytest.mark.long.mark
    cases = [
        *_cases("test_a", 7, marks=(few,)),
        *_cases("test_b", 4),
        *_cases("test_c", 5, marks=(few, long)),
    ]
    left = [*outside_of_samples(cases)]
    assert len(left) == 5
    assert all("test_a" in case.nodeid for case in left)


def test_a_case_that_is_asked_for_by_name_runs() -> None:
    marked = _cases("test_a", 7, marks=(pytest.mark.sample(2).mark,))
    assert not [*outside_of_samples(marked[:1])]


@pytest.mark.sample(3)
@pytest.mark.parametrize("one", ["x", "y"])
@pytest.mark.parametrize("other", ["x", "y", "z"])
def test_cases_that_pytest_makes_have_all_values(
    request: pytest.FixtureRequest, one: str, other: str
) -> None:
    """Of three cases, if no more and no fewer are asked for."""
    cases = [
        item
        for item in request.session.items
        if item.name.startswith("test_cases_that_pytest_makes")
    ]
    found = [cast(pytest.Function, case).callspec.params for case in cases]
    assert len(found) != 3 or {
        *map(len, map(set, zip(*(each.values() for each in found), strict=True)))
    } == {2, 3}


def _ids(cases: list[pytest.Item]) -> list[str]:
    return [case.nodeid for case in cases]
