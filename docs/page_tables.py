"""Tables of pages that a script writes between two comments."""

from collections.abc import Sequence
from pathlib import Path


def _marks(script: str) -> tuple[str, str]:
    """The comments before and after the table that a script writes."""
    return f"<!-- {script} writes this table -->\n\n", "\n<!-- end of the table -->"


def shown(page: Path, script: str) -> str:
    """The table that a page has now."""
    begin, end = _marks(script)
    return page.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]


def write(page: Path, script: str, table: str) -> None:
    """Puts a table in the place of the one that the page has."""
    begin, end = _marks(script)
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    page.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"
