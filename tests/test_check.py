"""`make check`: the tests nearest to a change are found by name and by import."""

from pathlib import Path

import pytest

import check


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "tests"
    for name, text in {
        "ir/test_types.py": "from scalec.compiler.ir.types import Type\n",
        "passes/test_fuse_ops.py": "from scalec.compiler.passes.fuse_ops import fuse_ops\n",
        "cli/test_far.py": "import json\n",
        "end_to_end/test_slow.py": "from scalec.compiler.ir.types import Type\n",
        "ops/test_uses.py": "from scalec.compiler.ir import types\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_a_test_of_the_name_comes_before_one_that_imports(root: Path) -> None:
    found = check.nearest_tests(["compiler/ir/types.py"], root)
    assert found == ["tests/ir/test_types.py", "tests/ops/test_uses.py"]


def test_a_changed_test_is_near_itself(root: Path) -> None:
    assert check.nearest_tests(["tests/cli/test_far.py"], root) == ["tests/cli/test_far.py"]


def test_a_document_is_near_no_test(root: Path) -> None:
    assert check.nearest_tests(["docs/far_away.md"], root) == []


def test_at_most_some_are_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MOST_TESTS", 1)
    assert check.nearest_tests(["compiler/ir/types.py"], root) == ["tests/ir/test_types.py"]


def test_types_and_tests_are_asked_of_changed_files_alone() -> None:
    names = [Path(command[0]).name for command, _ in check.commands(["README.md"])]
    assert names == ["ruff", "ruff", "lint-imports"]
    command, _ = check.commands(["compiler/ir/types.py"])[3]
    assert command[1:] == ["compiler/ir/types.py"]
