"""The page of strategies: its table has the figures that its plans have now."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "strategies.py"))


def test_the_table_is_counted_from_its_plans() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    assert SCRIPT["shown"](page) == SCRIPT["table"](), (
        "`python docs/strategies.py` writes it as plans are now"
    )


def test_the_page_names_the_number_of_its_plans() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    assert len(SCRIPT["STRATEGIES"]) == 11
    assert "## Eleven plans, counted" in page
