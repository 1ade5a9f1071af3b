"""Documents: all that they name exists, and quotations are as their sources."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scalec.compiler.cli.commands import COMMANDS
from scalec.compiler.frontend import resolve
from scalec.compiler.ir.printer import print_ir
from scalec.compiler.syntax.codes import get_codes
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *DECISIONS]
FOLDERS = "|".join(
    sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "out")
)

PRODUCT = ("compiler", "entry", "formats", "runtime", "tools")
SOURCES = [
    path
    for folder in (
        "compiler",
        "entry",
        "formats",
        "runtime",
        "testing",
        "tools",
        "benchmarks",
        "tests/helpers",
    )
    for path in ROOT.glob(f"{folder}/**/*.py")
]


def _place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_docstrings_name_their_subject() -> None:
    """Their sentences begin with a noun or a verb."""
    without = re.compile(r"(?:^|[.!?] +|\n\n)(?:What|Whatever|Those|Of)\b")
    assert [
        f"{path}: {text}" for path in SOURCES for text in _docstrings(path) if without.search(text)
    ] == []


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "benchmarks" / "RESULTS.md"], ids=_place)
def test_sentences_of_documents_name_their_subject(document: Path) -> None:
    """But for headings and questions."""
    prose = re.sub(
        r"^```.*?^```|^#.*?$", "", document.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"(?:^|\n\n|[.!?]\s+)((?:What|Those|Of)\b[^.!?]*[.!])", prose) == []


def test_modules_of_tests_name_their_subject() -> None:
    modules = {
        path: ast.get_docstring(ast.parse(path.read_text("utf-8")))
        for path in ROOT.glob("tests/**/*.py")
    }
    assert [
        str(path)
        for path, text in modules.items()
        if re.match(r"(?:What|Whatever|Those|Of)\b", text or "")
    ] == []


def _docstrings(path: Path) -> Iterator[str]:
    """All strings that are statements, a paragraph on one line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield "\n\n".join(" ".join(part.split()) for part in node.value.value.split("\n\n"))


def test_named_settings_of_watch_are_taken() -> None:
    named = {
        each
        for path in DOCUMENTS
        for each in re.findall(r"`(watch\s+\{[^`…]*\})`", path.read_text("utf-8"))
    }
    assert named
    for each in named:
        resolve(Source("plan.scale", f"{MODEL.read_text('utf-8')}\n{each}\n"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=_place)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w./]*)`", text))
    named |= {
        (document.parent / link).resolve().relative_to(ROOT)
        for link in re.findall(r"\]\(([^)#:]+)\)", text)
    }
    missing = sorted(str(name) for name in named if not (ROOT / name).exists())
    assert not missing


def test_every_module_of_the_product_has_a_row() -> None:
    """By its path, by its name, or by that of its folder."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = {*re.findall(r"`([\w./]+)`", text)}
    modules = [path.relative_to(ROOT) for path in SOURCES if path.name != "__init__.py"]
    product = [path for path in modules if path.parts[0] in PRODUCT]
    known = {
        path: {str(path), path.name, *(f"{folder}/" for folder in path.parents)} for path in product
    }
    assert [str(path) for path, names in known.items() if not names & rows] == []


def test_no_two_rows_begin_with_the_same_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    first = Counter(
        re.findall(r"^\| `((?:compiler|runtime|tools)/[\w./]+\.py)`", text, re.MULTILINE)
    )
    assert [name for name, times in first.items() if times > 1] == []


def test_the_floors_are_those_of_the_contracts() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    floors = {
        each["containers"][0]: " > ".join(each["layers"])
        for each in contracts
        if each["type"] == "layers"
    }
    assert dict(re.findall(r"^(compiler|runtime): +(\w+(?: [>|] \w+)+)$", text, re.MULTILINE)) == {
        name.removeprefix("scalec."): layers for name, layers in floors.items()
    }


def test_the_readme_shows_the_plan_and_the_program_as_they_are() -> None:
    blocks = re.findall(
        r"```(?:python)?\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    sources = [
        "plans/tiny_llama.scale",
        "plans/models/llama.scale",
        "tests/golden/tiny_llama/train.py",
    ]
    quoted = [
        block
        for block, source in zip(blocks, sources, strict=False)
        if block in (ROOT / source).read_text()
    ]
    assert len(quoted) == len(sources)


def test_the_page_of_commands_has_every_command() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert {command.name for command in COMMANDS} == {
        *re.findall(r"^scalec (\w+) ", text, re.MULTILINE)
    }


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_ranges_of_codes_are_those_of_the_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    ends: dict[str, str] = {code[:3]: code for code in get_codes() if code != "E0190"}
    assert re.findall(r"^\| [EW]\d+–([EW]\d+) \|", text, re.MULTILINE) == list(ends.values())


def test_the_quoted_ir_is_that_of_the_tiny_plan() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    quoted = re.search(r"--after insert_collectives`.*?```\n(.*?)```", text, re.DOTALL)
    assert quoted
    ir = (
        (ROOT / "tests/golden/tiny_llama/insert_collectives.ir")
        .read_text(encoding="utf-8")
        .split("\n")
    )
    known = {line.strip() for line in ir}
    assert not [line for line in quoted[1].splitlines() if line.strip() not in known]


MODEL = ROOT / "examples" / "06_mlp.scale"


def test_the_first_page_shows_the_plan_as_it_is() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    quoted = re.search(r"```\n(model mlp.*?)```", text, re.DOTALL)
    assert quoted
    assert quoted[1] in MODEL.read_text(encoding="utf-8")


def test_the_first_page_shows_what_each_pass_makes() -> None:
    """In order, line for line, but for those left out at `…`."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```ir (\w+)\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in blocks] == [name for name in PASS_NAMES if name in dict(blocks)]
    for name, block in blocks:
        lines = iter(_lines(print_ir(compile_plan(load(MODEL), name))))
        for line in _lines(block):
            assert line == "…" or line in lines, f"after {name} there is no `{line}`, or not there"


def _lines(text: str) -> list[str]:
    """Without indentation, and without the plan's lines."""
    return [re.sub(r" !\S+:\d+$", "", line.strip()) for line in text.splitlines()]


def test_the_page_for_machines_shows_a_diagnostic_as_it_is() -> None:
    text = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    quoted = re.search(r"<!-- (\S+) -->\n```json\n(.*?)```", text, re.DOTALL)
    assert quoted
    assert quoted[2] in (ROOT / quoted[1]).read_text(encoding="utf-8")


def test_every_decision_is_listed_and_has_the_four_parts() -> None:
    """In the list of decisions, in docs/architecture.md, and in the navigation of the site."""
    lists = (
        ROOT / "docs" / "decisions" / "README.md",
        ROOT / "docs" / "architecture.md",
        ROOT / "mkdocs.yml",
    )
    texts = [path.read_text(encoding="utf-8") for path in lists]
    numbered = [path for path in DECISIONS if path.name[:4].isdigit()]
    assert [int(path.name[:4]) for path in numbered] == [*range(1, len(numbered) + 1)]
    parts = ["Context", "Decision", "Consequences", "When to look again"]
    for path in numbered:
        assert [path.name in text for text in texts] == [True] * len(texts), path.name
        page = path.read_text(encoding="utf-8")
        number, title = re.findall(r"^# (\d+)\. (.*)$", page, re.MULTILINE)[0]
        assert (int(number), re.findall(r"^## (.*)$", page, re.MULTILINE)) == (
            int(path.name[:4]),
            parts,
        )
        assert all(title in text for text in texts[:2]), title
