"""The time of a step in what a compile writes: only where the plan's GPUs are known, and
checked by the read-back.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.readback_plans import demand_refused
from scalec.compiler import cli
from scalec.compiler.analysis.hardware import hardware
from scalec.compiler.analysis.time.report import Report, as_json, report
from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan, lower

PLANS = Path(__file__).parents[2] / "plans"
TEXT = 'use "tiny_pipeline.scale"\ncluster { gpu = h100_sxm  gpus_per_node = 4  nodes = 2 }\n'


def emit_plan(text: str) -> tuple[Program, dict[str, str]]:
    source = Source(str(PLANS / "timed.scale"), text)
    model = compile_plan(source, "resolve")
    program = lower(model)
    return program, emit(program, source, model, None)


@pytest.fixture(scope="module")
def written() -> tuple[Program, dict[str, str]]:
    return emit_plan(TEXT)


def _report(program: Program) -> Report:
    on = hardware(program)
    assert on
    return report(program, on)


def test_both_files_have_the_time(written: tuple[Program, dict[str, str]]) -> None:
    program, files = written
    found = _report(program)
    assert json.loads(files["plan.json"])["time"] == json.loads(json.dumps(as_json(found)))
    (prediction,) = json.loads(files["predictions.json"])["predictions"]
    said = prediction["expected"]
    assert said["gpu"] == "h100_sxm"
    assert said["seconds"] == pytest.approx(found.step.seconds, rel=1e-3)
    assert (said["error"], said["peak_flops"]) == (found.on.error, found.peak)
    tokens = program.train.global_batch * program.train.seq
    assert said["flops_per_token"] == pytest.approx(found.needed * found.ranks / tokens, abs=0.5)


def test_the_read_back_refuses_another_prediction(
    written: tuple[Program, dict[str, str]],
) -> None:
    program, files = written
    read = {name: text for name, text in files.items() if name != "plan.json"}
    changes = (
        ('"error": ', '"error": 1'),
        ('"seconds": ', '"seconds": 1'),
        ("h100_sxm", "h200"),
        ('"flops_per_token": ', '"flops_per_token": 1'),
        ('"peak_flops": ', '"peak_flops": 1'),
        ('"device": "cuda"', '"device": "cpu"'),
        ('"reserve": ', '"reserve": 1'),
        ('"axis": "pp"', '"axis": "dp"'),
        ('"ranks": [\n     ', '"ranks": [\n     1'),
    )
    for old, new in changes:
        demand_refused(read, program, "predictions.json", old, new)


def test_a_plan_without_a_cluster_pays_nothing(tmp_path: Path) -> None:
    """It has no time, and no module that makes one is loaded."""
    code = f"""
import sys
from scalec.compiler.cli import main
main(["compile", "--no-verify", {str(PLANS / "tiny_llama.scale")!r}, "-o", {str(tmp_path)!r}])
loaded = {{name for name in sys.modules if name.startswith("scalec.compiler.analysis.time")}}
sys.exit(loaded != {{"scalec.compiler.analysis.time"}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    assert "time" not in json.loads((tmp_path / "plan.json").read_text())
    assert "expected" not in (tmp_path / "predictions.json").read_text()


def test_a_cluster_of_its_own_figures_is_copied_and_rechecked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file gives the error of predictions; another one in the copy is refused."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "ours.toml").write_text('[cluster]\ngpu = "h100_sxm"\nerror = 0.07\n')
    cluster = 'cluster { gpu = h100_sxm  hardware = "clusters/ours.toml" }'
    (tmp_path / "p.scale").write_text(f'use "{PLANS / "tiny_llama.scale"}"\n{cluster}\n')
    out = tmp_path / "out"
    assert cli.main(["compile", str(tmp_path / "p.scale"), "-o", str(out)]) == 0
    assert json.loads((out / "plan.json").read_text())["time"]["error"] == 0.07
    assert '"error": 0.07,' in (out / "predictions.json").read_text()
    assert cli.main(["verify", "--recheck", str(out)]) == 0
    (out / "ours.toml").write_text((out / "ours.toml").read_text().replace("0.07", "0.08"))
    assert cli.main(["verify", "--recheck", str(out)]) == 1
    assert "ours.toml is not the plan's" in capsys.readouterr().err
