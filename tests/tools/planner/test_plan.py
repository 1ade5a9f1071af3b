"""`scalec plan`: what it prints, and what it says of mistakes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import CommandLine
from scalec.compiler import cli

PLANS = Path(__file__).parents[3] / "plans"

SMALL = "--gpus 4 --cluster h100_sxm --keep pp=1,microbatch=8,recompute=none --top 2"

Golden = Callable[[str, str], None]


def test_a_small_case(run_scalec: CommandLine, golden: Golden) -> None:
    status, out, err = run_scalec("plan", *f"{PLANS / 'tiny_llama.scale'} {SMALL}".split())
    assert status == 0
    for line in err.splitlines():
        assert re.fullmatch(r"(estimating|compiling|proving) [\d,]+ (choices|plans?) ?.*", line)
    assert err.startswith("estimating ")
    assert "\nproving 2 plans\n" in err
    golden("planned.txt", out)


@pytest.mark.long
def test_experts_and_plans_that_are_as_fast(run_scalec: CommandLine, golden: Golden) -> None:
    """And reasons about plans that are excluded."""
    line = (
        "--gpus 2 --cluster h100_sxm --seq 128 --global-batch 32 --keep"
        " pp=1,microbatch=8,recompute=none --top 3"
    )
    status, out, _ = run_scalec("plan", *f"{PLANS / 'models/tiny_moe.scale'} {line}".split())
    assert status == 0
    golden("planned_experts.txt", out)


def test_a_written_plan_is_formatted_and_compiles(run_scalec: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "best.scale"
    status, out, _ = run_scalec(
        "plan", *f"{PLANS / 'tiny_llama.scale'} {SMALL} --json -o {path}".split()
    )
    assert status == 0
    assert json.loads(out)["plan"] == path.read_text()
    assert cli.main(["fmt", "--check", str(path)]) == 0
    assert cli.main(["check", str(path)]) == 0
    path.write_text("mine")
    assert (
        run_scalec("plan", *f"{PLANS / 'tiny_llama.scale'} {SMALL} --json -o {path}".split())[0]
        == 2
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("nowhere.scale --gpus 4 --cluster h100_sxm", 1, "there is no file `nowhere.scale`"),
        ("tiny_llama.scale --gpus 4 --cluster h100", 2, "there is no GPU `h100`: did you mean"),
        ("tiny_llama.scale --gpus 4 --cluster none.toml", 1, "none.toml"),
        (
            "models/llama.scale --gpus 4 --cluster h100_sxm",
            2,
            "does not say `global_batch`: give --global-batch",
        ),
        (
            "tiny_llama.scale --gpus 12 --cluster h100_sxm",
            2,
            "12 GPUs are no whole number of nodes of 8",
        ),
        ("tiny_llama.scale --gpus 7 --cluster h100_sxm", 2, "no plan: of"),
        (
            "tiny_llama.scale --gpus 8 --cluster h100_sxm --global-batch 3 --keep pp=1,tp=1",
            2,
            "no plan: of",
        ),
        ("tiny_llama.scale --gpus 4 --cluster h100_sxm --keep tp=3", 2, "no choice has tp=3"),
        (
            "tiny_llama.scale --gpus 4 --sweep gups=1..4",
            2,
            "--sweep has no `gups`: did you mean `gpus`?",
        ),
        (
            "tiny_llama.scale --gpus 4 --sweep hidden=1..4",
            2,
            "a file with a model alone the sizes of its dims",
        ),
        (
            "models/llama.scale --gpus 4 --sweep hiden=1..4",
            2,
            "--sweep has no `hiden`: did you mean `hidden`?",
        ),
        ("tiny_llama.scale --gpus 4", 2, "give --cluster, as in --cluster h100_sxm"),
        ("tiny_llama.scale --gpus 4 --cluster h100_sxm --keep tq=3", 2, "--keep has no `tq`"),
        (
            "tiny_llama.scale --gpus 4 --cluster h100_sxm --keep tp=x",
            2,
            "`x`, which is not a whole number",
        ),
        ("tiny_llama.scale --gpus 4 --cluster h100_sxm --keep sp=yes", 2, "it takes `on`, `off`"),
        ("llama3_405b.scale --gpus 8 --cluster h100_sxm --keep zero=3", 1, ""),
    ],
)
def test_mistakes_are_told(
    line: str,
    status: int,
    says: str,
    run_scalec: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(PLANS)
    found, out, err = run_scalec("plan", *line.split())
    assert found == status, (out, err)
    assert says in err
    assert err or "nothing fits" in out
