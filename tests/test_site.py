"""The documents as a site: its generated pages are whole, its links lead somewhere, its
commands are known.
"""

import re
import shlex
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from scalec.compiler.cli.arguments import options
from scalec.compiler.cli.commands import COMMANDS
from scalec.compiler.config.fields import fields_of
from scalec.compiler.config.settings import DataSet, Train, Watch
from scalec.compiler.syntax.codes import get_codes

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_command_code_and_setting(reference: ModuleType) -> None:
    pages: dict[str, str] = reference.pages()
    assert not [
        command.name
        for command in COMMANDS
        if f"\n## scalec {command.name}\n" not in pages["commands"]
    ]
    assert not [code for code in get_codes() if f"\n## {code}\n" not in pages["codes"]]
    keys = [field.key for section in (Train, DataSet, Watch) for field in fields_of(section)]
    assert not [key for key in keys if f"| `{key}` |" not in pages["settings"]]


def test_the_site_is_built_and_each_link_leads_somewhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    assert "E0510" in (tmp_path / "reference" / "codes" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["how_to.md", "tutorial.md", "index.md"])
def test_commands_that_a_page_shows_are_taken(page: str) -> None:
    """Options and arguments are known, and the plans of this repository exist; `a`, `b` and
    `mine` are the reader's.
    """
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    commands = re.findall(
        r"^(?:\$ |\.venv/bin/)?scalec (.*)$",
        "\n".join(re.findall(r"```.*?```", text, re.DOTALL)),
        re.MULTILINE,
    )
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        options(words)
        plans = [Path(word) for word in words if word.endswith(".scale") and "/" in word]
        assert not [
            plan for plan in plans if plan.stem not in ("a", "b") and not (ROOT / plan).exists()
        ]
