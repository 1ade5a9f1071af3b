"""Sweeps: the best plan at each point, why it falls off, and pictures of it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from attrs import evolve

from scalec.compiler import cli
from scalec.compiler.analysis.hardware import find_shipped_gpu
from scalec.compiler.cli.output import UsageError
from scalec.tools.planner.choice import Choice
from scalec.tools.planner.command import swept_axes
from scalec.tools.planner.exact import Priced
from scalec.tools.planner.facts import Goal
from scalec.tools.planner.sweep import Point, cliff

PLANS = Path(__file__).parents[3] / "plans"
SVG = "{http://www.w3.org/2000/svg}"


def point(gpus: int, tokens: float, choice: Choice, kinds: dict[str, float] | None = None) -> Point:
    on = find_shipped_gpu("h100_sxm")
    assert on
    goal = Goal(gpus, evolve(on, ranks_per_node=8), 64, 4096)
    return Point({"gpus": gpus}, goal, Priced(choice, 1.0, kinds or {}, tokens, 0.5, 1, 100))


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (point(8, 100, Choice(dp=8)), point(16, 95, Choice(dp=16)), ""),
        (point(8, 100, Choice(dp=8)), point(16, 80, Choice(dp=16)), "crosses nodes"),
        (
            point(16, 100, Choice(dp=16)),
            point(32, 80, Choice(dp=16, tp=2)),
            "tensor parallelism of 2 in place of 1",
        ),
        (point(32, 100, Choice(dp=32)), point(64, 80, Choice(dp=64)), "one microbatch left"),
        (
            point(16, 100, Choice(pp=2, dp=8)),
            point(32, 80, Choice(pp=4, dp=8), {"bubble": 0.3}),
            "8 microbatches for 4 stages: bubble 30% in place of 0%",
        ),
        (
            point(16, 100, Choice(dp=16)),
            point(32, 80, Choice(dp=32), {"exposed: dp": 0.25}),
            "GPUs wait for links: 25% in place of 0% of a step",
        ),
        (
            point(16, 100, Choice(dp=16)),
            Point({}, point(32, 1, Choice()).goal, None),
            "nothing fits",
        ),
    ],
)
def test_a_cliff_says_its_cause(before: Point, after: Point, why: str) -> None:
    assert cliff(before, after) == why


@pytest.mark.long
def test_degrees_are_axes_of_a_sweep(tmp_path: Path) -> None:
    """At each point the best plan of that degree; one that leaves the node says so."""
    path = tmp_path / "points.csv"
    goal = ("--gpus", "4", "--cluster", "h100_sxm", "--gpus-per-node", "2", "--global-batch", "32")
    assert (
        cli.main(
            [
                "plan",
                str(PLANS / "tiny_llama.scale"),
                *goal,
                "--sweep",
                "tp=1..4",
                "--csv",
                str(path),
            ]
        )
        == 0
    )
    one, two, four = (line.split(",", 5) for line in path.read_text().splitlines()[1:])
    assert [one[0], two[0], four[0]] == ["1", "2", "4"]
    assert "tp" not in one[5]
    assert "tp 2" in two[5]
    assert four[5].endswith('"tensor parallelism leaves the node"')


def test_axes_of_a_sweep() -> None:
    assert swept_axes("gpus=8..64") == {"gpus": [8, 16, 32, 64]}
    assert swept_axes("seq=1024:3072,cluster=h200:b200") == {
        "seq": [1024, 3072],
        "cluster": ["h200", "b200"],
    }
    for wrong in ("gpus=8..x", "gpus=", "gpus=0..4", "gpus=8..4", "gpus=1,seq=2,layers=3"):
        with pytest.raises(UsageError):
            swept_axes(wrong)


@pytest.mark.long
def test_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, csv = tmp_path / "curves.svg", tmp_path / "points.csv"
    line = "--cluster h100_sxm --keep pp=1,microbatch=4,recompute=none --sweep gpus=1..4"
    assert (
        cli.main(
            [
                "plan",
                str(PLANS / "tiny_llama.scale"),
                *line.split(),
                "--svg",
                str(svg),
                "--csv",
                str(csv),
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    assert out == csv.read_text()
    *points, wrote_csv, wrote_svg = err.splitlines()
    assert [wrote_csv, wrote_svg] == [f"wrote {csv}", f"wrote {svg}"]
    assert points == [
        f"point {number} of 3: gpus {gpus}" for number, gpus in enumerate((1, 2, 4), start=1)
    ]
    rows = csv.read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["gpus", "1", "2", "4"]
    texts = [it.text or "" for it in ElementTree.parse(svg).iter(f"{SVG}text")]
    assert {"tokens/s/GPU", "MFU, %", "gpus", "dp 4, microbatch 4, zero 0"} <= {*texts}
    assert len([*ElementTree.parse(svg).iter(f"{SVG}circle")]) == 6


@pytest.mark.long
def test_a_heat_map_over_sizes_and_machines(tmp_path: Path) -> None:
    svg = tmp_path / "heat.svg"
    line = (
        "--gpus 8 --global-batch 8 --seq 1024 --keep pp=1,tp=1,recompute=full --sweep"
        " layers=2:4,cluster=h100_sxm:l4"
    )
    assert (
        cli.main(["plan", str(PLANS / "models" / "llama.scale"), *line.split(), "--svg", str(svg)])
        == 0
    )
    texts = [it.text or "" for it in ElementTree.parse(svg).iter(f"{SVG}text")]
    assert {"layers", "cluster", "2", "4", "h100_sxm", "l4"} <= {*texts}
    assert cli.main(["plan", str(PLANS / "tiny_llama.scale"), *line.split()]) == 2
