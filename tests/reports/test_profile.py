"""Profiled steps beside the prediction: whose they are, that nothing is lost, and where nothing
is compared.
"""

import json
from pathlib import Path

import pytest

from scalec.compiler import cli
from scalec.compiler.analysis.time import get_expected_report
from scalec.compiler.analysis.time.profile import ELSEWHERE, KINDS, beside, ranks_at, read_profile
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"

LINES = {
    "": {"idle": 0.001},
    "train.py:90": {"compute": 0.002},
    "llama.scale:28": {"compute": 0.030, "exposed": 0.010},
    "llama.scale:22": {"compute": 0.004, "exposed": 0.020, "idle": 0.001},
}
"""Seconds of a step by line."""


def _source(plan: str, cluster: str = "gpu = h100_sxm") -> Source:
    return Source(str(PLANS / "measured.scale"), f'use "{plan}.scale"\ncluster {{ {cluster} }}\n')


def _profile(folder: Path, *ranks: int, device: str = "cuda") -> Path:
    """Each rank takes as much longer as its number says."""
    folder.mkdir()
    for rank in ranks:
        lines = {
            line: {kind: time * (1 + rank) for kind, time in kinds.items()}
            for line, kinds in LINES.items()
        }
        sums = {"device": device, "steps": 3, "seconds": 0.068 * (1 + rank), "lines": lines}
        (folder / f"rank{rank:05}-lines.json").write_text(json.dumps(sums))
    return folder


def test_lines_add_up_to_what_was_measured_and_predicted(tmp_path: Path) -> None:
    program = compile_plan(_source("tiny_llama"))
    found, profile = get_expected_report(program), read_profile(_profile(tmp_path / "p", 0, 2))
    assert found
    assert profile
    assert profile.seconds == pytest.approx(0.068 * 2)
    lines = beside(profile, found.step)
    assert sum(line.measured.get(kind, 0.0) for line in lines for kind in KINDS) == pytest.approx(
        profile.seconds
    )
    assert sum(sum(line.predicted.values()) for line in lines) == pytest.approx(found.step.seconds)
    assert [line.name for line in lines] == ["llama.scale:28", "llama.scale:22", ELSEWHERE]
    ffn = sum(
        time
        for (kind, line), time in found.step.spent.items()
        if line == "llama.scale:28" and kind[:7] == "exposed"
    )
    assert lines[0].predicted["exposed"] == pytest.approx(ffn)
    assert lines[-1].measured == pytest.approx({"compute": 0.004, "exposed": 0.0, "idle": 0.002})


def test_of_a_pipeline_those_ranks_count_that_are_predicted(tmp_path: Path) -> None:
    """Its axis is the outermost of pp 2, dp 2, tp 2: the second half of the ranks are the
    second place's.
    """
    program = compile_plan(_source("tiny_pipeline"))
    assert ranks_at(program, 1) == [4, 5, 6, 7]
    assert ranks_at(compile_plan(_source("tiny_llama")), None) == []
    folder = _profile(tmp_path / "p", 0, 3, 4, 7)
    assert (found := read_profile(folder, [4, 5, 6, 7]))
    assert (found.ranks, found.seconds) == ((4, 7), pytest.approx(0.068 * 6.5))
    assert (found := read_profile(folder, [5, 6]))
    assert found.ranks == (0, 3, 4, 7)


def _explained(tmp_path: Path, folder: Path, cluster: str) -> int:
    plan = tmp_path / "p.scale"
    plan.write_text(f'use "{PLANS / "tiny_llama.scale"}"\n{cluster}\n')
    return cli.main(["explain", "time", str(plan), "--against", str(folder)])


def test_a_person_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _explained(tmp_path, _profile(tmp_path / "p", 0), "cluster { gpu = h100_sxm }") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "3 steps of 1 rank on cuda: 68.0 ms a step"
    assert out[1].startswith("predicted on h100_sxm: ")
    assert out[3].split() == ["compute", "predicted", "exposed", "predicted", "idle", "predicted"]
    assert out[4].startswith("llama.scale:28  30.0 ms")
    assert [line.split()[0] for line in out[5:]] == ["llama.scale:22", "elsewhere", "in"]
    assert out[-1].split()[2:4] == ["36.0", "ms"]


@pytest.mark.parametrize(
    ("cluster", "device"), [("", "cuda"), ("cluster { gpu = h100_sxm }", "cpu")]
)
def test_nothing_is_compared_on_another_device(
    cluster: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor where the plan names no GPU."""
    assert _explained(tmp_path, _profile(tmp_path / "p", 0, device=device), cluster) == 0
    out = capsys.readouterr().out
    assert "predicted" not in out
    assert f"on {device}: 68.0 ms a step\n\n                compute  exposed    idle\n" in out


def test_folders_that_are_no_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _explained(tmp_path, tmp_path / "none", "") == 2
    assert "has no profile: train with SCALEC_PROFILE=" in capsys.readouterr().err
    for text in ("{", "[]", "{}", '{"device": 3, "lines": 4}'):
        (tmp_path / "rank00000-lines.json").write_text(text)
        assert _explained(tmp_path, tmp_path, "") == 2
        assert "no run of this scalec wrote" in capsys.readouterr().err
