"""The page of strategies: its table has the figures that its plans have now."""

import strategies
from page_tables import shown


def test_the_table_is_counted_from_its_plans() -> None:
    assert shown(strategies.PAGE, "strategies.py") == strategies.table(), (
        "`python docs/strategies.py` writes it as plans are now"
    )


def test_the_page_names_the_number_of_its_plans() -> None:
    page = strategies.PAGE.read_text(encoding="utf-8")
    assert len(strategies.STRATEGIES) == 11
    assert "## Eleven plans, counted" in page
