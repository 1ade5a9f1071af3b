"""`make check`: the quick checks of a change, in some 90 seconds.

Format, lint and layers of everything; types of the changed files; the tests nearest to them.
Changed are the files that differ from the last commit, or that it changed where none differ.

A test is near a file if it has the file's name (`test_NAME.py`) or imports its module.  At most
`MOST_TESTS` files of tests are run, the nearest first, and none of the folders of `SLOW`.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.executable).parent

MOST_TESTS = 8
SLOW = ("end_to_end", "golden", "helpers")


def changed_files() -> list[str]:
    """The files of the change, by their paths in the repository."""
    differ = _git("diff", "--name-only", "--diff-filter=d", "HEAD")
    new = _git("ls-files", "--others", "--exclude-standard")
    if differ or new:
        return sorted({*differ, *new})
    return _git("diff", "--name-only", "--diff-filter=d", "HEAD~1", "HEAD")


def _git(*arguments: str) -> list[str]:
    finished = subprocess.run(
        ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return finished.stdout.split()


def nearest_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """The files of tests that are near some files, the nearest first."""
    distances: dict[str, int] = {}
    tests = _quick_tests(root)
    for file in files:
        for test, text in tests.items():
            distance = _distance(file, test, text)
            if distance is not None:
                distances[test] = min(distance, distances.get(test, distance))
    return sorted(distances, key=lambda test: (distances[test], test))[:MOST_TESTS]


def _quick_tests(root: Path) -> dict[str, str]:
    """The text of each file of tests outside of the slow folders."""
    tests: dict[str, str] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        relative = path.relative_to(root)
        if relative.parts[1] not in SLOW:
            tests[relative.as_posix()] = path.read_text(encoding="utf-8")
    return tests


def _distance(file: str, test: str, text: str) -> int | None:
    """0 for a test itself or one of the file's name, 1 for one that imports it, else None."""
    path = Path(file)
    if file == test or Path(test).stem == f"test_{path.stem}":
        return 0
    if path.suffix != ".py":
        return None
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    imports = (f"from scalec.{module} import", f"from scalec.{parent} import {name}\n")
    return 1 if any(line in text for line in imports) else None


def commands(files: Sequence[str]) -> list[tuple[list[str], Path]]:
    """The command of each check, and the folder that it runs in."""
    layers = [_tool("lint-imports"), "--no-logo", "--config", "../pyproject.toml"]
    checks = [
        ([_tool("ruff"), "format", "--check", "--quiet"], ROOT),
        ([_tool("ruff"), "check", "--quiet"], ROOT),
        (layers, ROOT / ".typing"),
    ]
    modules = [file for file in files if file.endswith(".py")]
    if modules:
        checks.append(([_tool("pyright"), *modules], ROOT))
    tests = nearest_tests(files)
    if tests:
        checks.append(
            ([_tool("pytest"), "-q", "-x", "-n", "2", "--dist", "loadgroup", *tests], ROOT)
        )
    return checks


def _tool(name: str) -> str:
    return str(TOOLS / name)


def main() -> int:
    """Runs the checks one after another; the status is 1 at the first that fails."""
    files = changed_files()
    print(f"{len(files)} changed files")
    for command, folder in commands(files):
        print(" ".join((Path(command[0]).name, *command[1:])), flush=True)
        if subprocess.run(command, cwd=folder).returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
