"""`make readability`: each gauge counts what its name says, and none is above its ratchet."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READABILITY = runpy.run_path(str(ROOT / "benchmarks" / "readability.py"))

DENSE = '''"""A module."""


def counted(given):
    """Those of a list, in the form of which a name is made."""
    it = [[y for y in x] for x in given]
    # [a comment is no code for x in x]
    return f"{1 if it else 2}" + "a line that is much wider than the one hundred columns which a reader's eye takes in"
'''


def places(text: str) -> Counter[str]:
    return Counter(place.gauge for place in READABILITY["Module"]("a.py", text).places())


def test_each_gauge_counts_its_places() -> None:
    assert places(DENSE) == {
        "comprehensions per 1,000 lines": 2,
        "comprehensions inside others per 1,000 lines": 1,
        "conditional expressions per 1,000 lines": 1,
        "conditional expressions in f-strings": 1,
        "vague names of values per 1,000 lines": 2,
        "lines over 100 columns, %": 1,
        "functions named by participles, %": 1,
        "those per 1,000 words of docstrings": 1,
        "that of, of which … per 1,000 words of docstrings": 2,
    }


def test_long_functions_and_many_branches_are_counted() -> None:
    branches = "    if x:\n        pass\n" * 11
    lines = "    x = 1\n" * 50
    assert places(f"def run(x):\n{branches}") == {"functions over 10 branches": 1}
    assert places(f"def run(x):\n{lines}") == {"functions over 50 lines": 1}


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    text = '"""A module.\n\nMore.\n"""\n\n# why\nX = """a\nb"""\n'
    base = READABILITY["Module"]("a.py", text).base
    assert (base.code_lines, base.functions, base.docstring_words) == (2, 0, 3)


@pytest.mark.parametrize(
    ("name", "is_participle"),
    [
        ("made", True),
        ("checked_rows", True),
        ("_told", True),
        ("feed", False),
        ("embed_tokens", False),
    ],
)
def test_participles_are_told_from_words_that_end_alike(name: str, is_participle: bool) -> None:
    counts = places(f"def {name}(): pass")
    assert counts["functions named by participles, %"] == is_participle


def test_no_gauge_is_above_its_ratchet(capsys: pytest.CaptureFixture[str]) -> None:
    assert READABILITY["main"]([]) == 0, capsys.readouterr().out


def test_a_gauge_above_its_ratchet_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    held = {"some gauge": {"most": 1.0, "goal": 0.5}}
    assert "above its ratchet" in "\n".join(READABILITY["table"]({"some gauge": 1.1}, held))
    assert "above its ratchet" not in "\n".join(READABILITY["table"]({"some gauge": 1.0}, held))


def test_a_ratchet_falls_and_never_rises(tmp_path: Path) -> None:
    file = tmp_path / "ratchets.toml"
    file.write_text('["a"]\nmost = 2\ngoal = 1\n\n["b"]\nmost = 2\ngoal = 1\n')
    READABILITY["lower"]({"a": 1.5, "b": 3.0}, file)
    assert READABILITY["ratchets"](file) == {
        "a": {"most": 1.5, "goal": 1},
        "b": {"most": 2, "goal": 1},
    }
