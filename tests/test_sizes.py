"""The page of sizes: its table has the plans that the planner finds now."""

import pytest
import sizes
from page_tables import shown

ROWS = [
    row.removeprefix("| ").removesuffix(" |").split(" | ")
    for row in shown(sizes.PAGE, "sizes.py").splitlines()[2:]
]


def test_each_size_has_its_row() -> None:
    assert [cells[:2] for cells in ROWS] == [[size.name, f"{size.gpus:,}"] for size in sizes.SIZES]


@pytest.mark.long
@pytest.mark.parametrize(
    "number", range(len(sizes.SIZES)), ids=lambda number: " on ".join(ROWS[number][:2])
)
def test_a_row_is_what_the_planner_finds(number: int) -> None:
    assert sizes.cells(sizes.SIZES[number]) == ROWS[number], (
        "`python docs/sizes.py` writes it as plans are now"
    )
