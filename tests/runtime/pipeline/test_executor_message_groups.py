"""Messages that begin as one, as a rank's line of the compiler's file says."""

import pytest

from helpers.staged_model import schedules
from scalec.compiler.schedules.csv_file import csv, groups_csv
from scalec.runtime.pipeline.executor import group_messages, parse_row


def _words(row: str, groups: str) -> list[str]:
    made = group_messages(parse_row(row), groups)
    return [" ".join(f"{it.stage}{it.work}{it.microbatch}" for it in group) for group in made]


def test_messages_of_a_group_begin_together_and_all_others_alone() -> None:
    row = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0RECV_B2"
    assert _words(row, "") == row.split(",")
    made = _words(row, "0SEND_F0 0RECV_B0,0SEND_F1 0RECV_B1")
    assert made == ["0F0", "0SEND_F0 0RECV_B0", "0B0", "0F1", "0SEND_F1 0RECV_B1", "0RECV_B2"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_begins_the_groups_that_the_compiler_has_written(ranks: int) -> None:
    for name, schedule in schedules(ranks, [2 * ranks]):
        written = [
            [tuple(map(str, group)) for group in schedule.groups if group[0] in row]
            for row in schedule.rows
        ]
        for row, groups, own in zip(
            csv(schedule).split(), groups_csv(schedule).split("\n"), written, strict=False
        ):
            made = [tuple(each.split()) for each in _words(row, groups)]
            assert [group for group in made if len(group) > 1] == own, name
            assert [word for group in made for word in group] == row.split(",")


def test_forwards_keep_their_parts_of_groups() -> None:
    """In evaluation too a group is the same at both ends: what is left of it are the same
    messages.
    """
    for row in ("0SEND_F1,2RECV_F0,0RECV_B0", "1RECV_F1,1SEND_F0,1SEND_B0"):
        forwards = [each for each in parse_row(row) if each.is_forward]
        (group,) = group_messages(forwards, row.replace(",", " "))
        assert group == forwards
