"""Checkpoints that former versions wrote resume under the present one, on the same mesh and on
another.

`checkpoint_of_0_1_0/` has the plan, its data, the checkpoint after step 2, and the log of a run
that had no break.  The files are kept as 0.1.0 wrote them on November 28, 2026 and are never
written anew.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import scalec
from helpers.forked_ranks import HANGS
from scalec.compiler import __version__
from scalec.testing.faults import Program, fork

ROOT = Path(__file__).parents[2]
FORMER = sorted(Path(__file__).parent.glob("checkpoint_of_*"))
MESH = "mesh  { dp = 2 }\nshard { batch over dp }\nstate { zero 1 over dp }"
OTHER_MESH = "mesh  { tp = 2 }\nshard { ffn over tp }"


def _losses(log: Path) -> dict[int, float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.parametrize("mesh", [MESH, OTHER_MESH], ids=["same mesh", "another mesh"])
@pytest.mark.parametrize("former", FORMER, ids=lambda folder: folder.name)
def test_a_checkpoint_of_a_former_version_resumes(former: Path, mesh: str, tmp_path: Path) -> None:
    text = (former / "plan.scale").read_text()
    assert MESH in text
    plan = tmp_path / "first.scale"
    plan.write_text(text.replace(MESH, mesh))
    scalec.plan(plan).write(tmp_path / "program")
    shutil.copy(former / "corpus.bin", tmp_path / "program")
    shutil.copytree(former / "step-000002", tmp_path / "run" / "checkpoints" / "step-000002")

    program = Program(tmp_path / "program", ranks=2, options="--device=cpu --out=../run --resume")
    with fork(program) as job:
        ended = job.wait(HANGS)

    assert ended.succeeded, "".join(ended.err)
    expected = _losses(former / "log.jsonl")
    losses = _losses(tmp_path / "run" / "log.jsonl")
    assert sorted(losses) == [3, 4]
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-5)


def test_each_former_version_of_the_changelog_has_a_checkpoint() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, *former = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)
    assert newest == __version__
    kept = {folder.name.removeprefix("checkpoint_of_").replace("_", ".") for folder in FORMER}
    assert kept == {*former}
