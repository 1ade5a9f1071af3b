"""Rows for other numbers of ranks and microbatches are right rows."""

import pytest

from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.check import problems
from scalec.compiler.schedules.csv_file import csv, parse_csv
from scalec.compiler.schedules.p2p import with_messages
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.schedules.rescale import resize
from scalec.compiler.schedules.timeline import Times


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_rows_of_other_sizes_do_all_their_work(name: str, ranks: int) -> None:
    made = SCHEDULES[name](3, 12)
    for schedule in (made, with_messages(made, Times.uniform(made.stages))):
        for microbatches in (1, 3, 13):
            found = resize(schedule, ranks, microbatches)
            assert (found.ranks, found.microbatches) == (ranks, microbatches)
            assert not problems(found)


def test_sizes_that_are_its_own_change_nothing() -> None:
    made = SCHEDULES["zbv"](2, 4)
    assert resize(made, 2, 4) == made


@pytest.mark.parametrize("name", ["zb_h1", "zbv"])
def test_what_is_split_stays_so(name: str) -> None:
    made = SCHEDULES[name](4, 8)
    assert made.splits
    assert resize(made, 2, 2).splits


def test_a_microbatch_that_is_split_stays_among_few() -> None:
    rows = _rows("0F0,0B0,0F1,0B1,0F2,0I2,0W2")
    assert csv(resize(rows, 1, 2)) == "0F0,0B0,0F1,0I1,0W1\n"


def _rows(*lines: str) -> Schedule:
    return parse_csv("\n".join(lines))


def test_ranks_of_the_first_and_the_last_stage_stay() -> None:
    fold = _rows("0F0,3F0,3B0,0B0", "1F0,2F0,2B0,1B0")
    assert csv(resize(fold, 1, 1)) == "0F0,1F0,1B0,0B0\n"
    line = _rows("0F0,0B0", "1F0,1B0", "2F0,2B0")
    assert csv(resize(line, 2, 1)) == "0F0,0B0\n1F0,1B0\n"


def test_what_is_added_is_done_at_once() -> None:
    line = _rows("0F0,0F1,0B0,0B1")
    assert csv(resize(line, 2, 3)) == "0F0,0F1,0B0,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
