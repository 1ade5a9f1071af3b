"""Packages of npm that tests need, each at its version; they lie outside of the repository."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest

from helpers.launched import HANGS

VERSIONS = {
    "vscode-textmate": "9.3.2",
    "vscode-oniguruma": "2.0.1",
    "vscode-languageclient": "9.0.1",
    "@vscode/vsce": "3.9.2",
    "@microsoft/jest-sarif": "1.0.0-beta.0",
}
NODE, NPM = shutil.which("node"), shutil.which("npm")


@cache
def modules() -> Path:
    """The folder of the packages, installed where they are not yet; the test is skipped where
    they cannot be.
    """
    if not (NODE and NPM):
        pytest.skip("there is no Node: node and npm are not on the path")
    folder = Path(os.environ.get("SCALEC_NODE") or Path(gettempdir()) / "scalec-node")
    folder.mkdir(exist_ok=True)
    wanted, written = (
        json.dumps({"private": True, "dependencies": VERSIONS}),
        folder / "package.json",
    )
    if not written.exists() or written.read_text() != wanted:
        (folder / "package-lock.json").unlink(missing_ok=True)
        written.write_text(wanted)
        if install(folder):
            written.unlink()
            pytest.skip("npm cannot install the packages")
    return folder / "node_modules"


def install(folder: Path) -> int:
    """Installs what a package needs, and runs none of its scripts; the status of npm."""
    assert NPM
    line = [NPM, "install", "--ignore-scripts", "--no-audit", "--no-fund"]
    return subprocess.run(
        line, check=False, cwd=folder, capture_output=True, timeout=HANGS
    ).returncode


def node(script: Path, *words: str) -> list[Any]:
    """The values that a script prints, a line of JSON each."""
    found = {"NODE_PATH": str(modules())}
    assert NODE
    line = [NODE, str(script), *words]
    ended = subprocess.run(
        line,
        check=False,
        env={**os.environ, **found},
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]
