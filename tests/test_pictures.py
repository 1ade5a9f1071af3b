"""The pictures of the documents are those that their script draws from plans, and each is shown
somewhere.
"""

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = runpy.run_path(str(DOCS / "pictures.py"))


@pytest.mark.parametrize("name", SCRIPT["PICTURES"])
def test_a_picture_is_drawn_from_plans(name: str, request: pytest.FixtureRequest) -> None:
    path, text = DOCS / "pictures" / f"{name}.svg", SCRIPT["picture"](name)
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, (
        "`python docs/pictures.py` draws it as plans are now"
    )
    ElementTree.fromstring(text)


def test_each_picture_is_shown_by_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == {*SCRIPT["PICTURES"]}
    assert not [name for name in SCRIPT["PICTURES"] if f"(pictures/{name}.svg)" not in pages]
