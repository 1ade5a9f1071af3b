"""The lines for Neovim of docs/editors.md, in a real Neovim that edits a plan.

`SCALEC_NVIM` names one that is not on the path.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.edited_plan import write_plan
from helpers.launched import HANGS

ROOT = Path(__file__).parents[3]
SESSION = ROOT / "tests" / "helpers" / "neovim_session.lua"
NVIM = os.environ.get("SCALEC_NVIM") or shutil.which("nvim") or ""


def version() -> tuple[int, ...]:
    """The version of Neovim; nothing where there is none."""
    if not NVIM:
        return ()
    said = subprocess.run(
        [NVIM, "--version"], check=True, capture_output=True, text=True, timeout=HANGS
    ).stdout
    return tuple(map(int, re.findall(r"\d+", said.splitlines()[0])))


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        version() < (0, 11), reason="there is no Neovim from 0.11 on: it is not on the path"
    ),
]


def snippets() -> list[str]:
    """The Lua of the page, in its order."""
    return re.findall(
        r"```lua\n(.*?)```", (ROOT / "docs" / "editors.md").read_text("utf-8"), re.DOTALL
    )


@pytest.mark.parametrize("number", range(len(snippets())))
def test_a_plan_is_edited(number: int, tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    write_plan(tmp_path)
    (tmp_path / ".git").mkdir()
    (tmp_path / "init.lua").write_text(snippets()[number])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    places = {
        f"XDG_{name}_HOME": str(tmp_path / name.lower())
        for name in ("CONFIG", "DATA", "STATE", "CACHE")
    }
    told = {"SCALEC_SEEN": str(tmp_path / "seen"), "SCALEC_HANGS": str(HANGS), "PATH": path}
    line = [
        NVIM,
        "--headless",
        "-i",
        "NONE",
        "-n",
        "-u",
        "init.lua",
        "-c",
        f"luafile {SESSION}",
        "plan.scale",
    ]
    ended = subprocess.run(
        line,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **places, **told},
        capture_output=True,
        timeout=2 * HANGS,
    )
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert seen[-1] == ["done", True], ended.stderr.decode()
    golden(
        "lsp/neovim.json",
        "".join(f"{json.dumps(each, ensure_ascii=False, sort_keys=True)}\n" for each in seen),
    )
