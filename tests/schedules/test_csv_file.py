"""Rows as text: torch reads ours, we read torch's, and what is no such text is told where."""

from pathlib import Path

import pytest

from helpers.schedules import torch_orders
from scalec.compiler.schedules.actions import Schedule
from scalec.compiler.schedules.csv_file import BadRows, csv, parse_csv
from scalec.compiler.schedules.registry import SCHEDULES

SIZES = ((1, 4), (2, 4), (4, 8), (3, 9))


def words(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.rows]


def test_text():
    assert csv(SCHEDULES["1f1b"](2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_read_back(name: str, ranks: int, microbatches: int):
    schedule = SCHEDULES[name](ranks, microbatches)
    assert parse_csv(csv(schedule)) == schedule


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_ours(name: str, ranks: int, microbatches: int, tmp_path: Path):
    """It also finds the stages' stage_to_rank, adds its own messages, and can run them."""
    schedule = SCHEDULES[name](ranks, microbatches)
    (tmp_path / "rows.csv").write_text(csv(schedule))
    theirs = torch_orders.runtime(ranks, microbatches, SCHEDULES[name].chunks)
    theirs._load_csv(tmp_path / "rows.csv", format="compute_only")
    assert torch_orders.orders(theirs.pipeline_order) == words(schedule)
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.stage_to_rank))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", torch_orders.SEVERAL)
def test_we_read_torchs(name: str, ranks: int, microbatches: int, tmp_path: Path):
    theirs = torch_orders.schedule(name, ranks, microbatches, SCHEDULES[name].chunks)
    theirs._dump_csv(tmp_path / "rows.csv", format="compute_only")
    assert parse_csv((tmp_path / "rows.csv").read_text()) == SCHEDULES[name](ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize("name", torch_orders.SEVERAL)
def test_rows_with_messages(name: str, ranks: int, microbatches: int, tmp_path: Path):
    """Torch's rows with messages are read, but for what it does to weights; torch reads these
    as we write them.
    """
    chunks = SCHEDULES[name].chunks
    theirs = torch_orders.schedule(name, ranks, microbatches, chunks)
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_comms")
    schedule = parse_csv((tmp_path / "theirs.csv").read_text())
    assert words(schedule) == torch_orders.orders(theirs.pipeline_order_with_comms)
    (tmp_path / "ours.csv").write_text(csv(schedule))
    again = torch_orders.runtime(ranks, microbatches, chunks)
    again._load_csv(tmp_path / "ours.csv", format="compute_comms")
    assert torch_orders.orders(again.pipeline_order_with_comms) == words(schedule)


def test_spaces_idle_cells_and_ends_of_lines():
    assert words(parse_csv("0F0,, 0B0\r\n,1F0,1B0,,\r\n\r\n")) == [["0F0", "0B0"], ["1F0", "1B0"]]


def test_overlapped_pair():
    assert words(parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1")) == [["0F0", "0F1", "0B0", "0B1"]]


MISTAKES = {
    "": (0, 0, "the rank has nothing to do"),
    "0F0,0B0\n,,\n1F0,1B0": (1, 0, "the rank has nothing to do"),
    "0F0,0B0\n1F0,,2": (1, 2, "`2` is not an action such as `3F12`"),
    "0F0,0X0": (0, 1, "`0X0` is not an action such as `3F12`"),
    "0F0,0F٣": (0, 1, "`0F٣` is not an action such as `3F12`"),
    "0F0,0F0123456789": (0, 1, "`0F0123456789` is not an action such as `3F12`"),
    "0F0,0SEND_F": (0, 1, "`0SEND_F` is not an action such as `3F12`"),
    "0F0,(0F1;0B)OVERLAP_F_B": (0, 1, "`0B` is not an action such as `3F12`"),
    f"0F0,{'x' * 100}": (0, 1, f"`{'x' * 23}…` is not an action such as `3F12`"),
    "0F0,0B0\n1F0,0F1": (1, 1, "`0F1` is for stage 0, which rank 0 has"),
    "0F0,0B0\n3F0,1B0": (1, 0, "there is a stage 3, but no stage 2"),
    "0F0,5F0,6F0": (0, 2, "there is a stage 6, but no stage 1"),
    "0F0,0F1,0B0,0B999999999": (0, 3, "there is a microbatch 999999999, but no microbatch 2"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes(text: str):
    with pytest.raises(BadRows) as bad:
        parse_csv(text)
    assert (bad.value.rank, bad.value.cell, bad.value.why) == MISTAKES[text]
