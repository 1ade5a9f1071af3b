"""The page of sizes: its table has the plans that the planner finds now."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "sizes.py"))
ROWS = SCRIPT["shown"]((ROOT / "docs" / "sizes.md").read_text(encoding="utf-8")).splitlines()[2:]


def test_each_size_has_its_row() -> None:
    cells = [row.split(" | ")[:2] for row in ROWS]
    assert cells == [[f"| {size.name}", f"{size.gpus:,}"] for size in SCRIPT["SIZES"]]


@pytest.mark.long
@pytest.mark.parametrize(
    "number", range(len(ROWS)), ids=lambda number: ROWS[number].split(" | ")[0].strip("| ")
)
def test_a_row_is_what_the_planner_finds(number: int) -> None:
    assert SCRIPT["row"](SCRIPT["SIZES"][number]) == ROWS[number], (
        "`python docs/sizes.py` writes it as plans are now"
    )
