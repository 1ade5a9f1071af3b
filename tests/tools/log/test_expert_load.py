"""The loads of a run's experts, as a table and as a picture, against counts in a log."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from scalec.compiler.cli import main
from scalec.tools.log.expert_load import BOUNDS, COLOURS, parse_log, svg, text

LOADS = {  # by step, of 2 layers with 4 experts each
    2: [[10, 10, 10, 10], [40, 0, 0, 0]],
    4: [[5, 15, 12, 8], [20, 10, 9, 1]],
    6: [[10, 9, 11, 10], [11, 9, 11, 9]],
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that began again after step 2."""
    lines = [
        {"step": 1, "account": 5},
        {"step": 2, "loss": 1.0, "expert_load": [[40, 0, 0, 0], [40, 0, 0, 0]]},
    ]
    lines += [{"step": step, "loss": 1.0, "expert_load": load} for step, load in LOADS.items()]
    return write(tmp_path / "tiny", [*lines, {"step": 6, "validation": 2.0}])


def write(folder: Path, records: list[dict[str, object]]) -> Path:
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def test_the_table_has_the_least_and_the_most(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["loads", str(run)]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == [
        "tiny: loads of 4 experts in 2 layers, steps 2 to 6",
        "",
        "layer         step 2       step 4       step 6",
        "0        1.00 – 1.00  0.50 – 1.50  0.90 – 1.10",
        "1        0.00 – 4.00  0.10 – 2.00  0.90 – 1.10",
    ]
    assert main(["loads", str(run / "log.jsonl")]) == 0


def test_each_box_of_the_picture_has_the_colour_of_its_load(run: Path, tmp_path: Path) -> None:
    assert main(["loads", str(run), "--svg", str(tmp_path / "a.svg")]) == 0
    assert main(["loads", str(run), "--svg", str(tmp_path / "b.svg")]) == 0
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    found = boxes(tmp_path / "a.svg")
    xs, ys = ({*each} for each in zip(*((x, y) for x, y, *_ in found), strict=True))
    assert len(ys) == 8  # experts of both layers
    (height,) = {height for *_, height, _ in found}
    left, step = min(xs), (max(x + width for x, _, width, *_ in found) - min(xs)) / 3
    for at, layers in enumerate(LOADS.values()):
        shares = [count * 4 / 40 for counts in layers for count in counts]
        for y, share in zip(sorted(ys), shares, strict=True):
            middle = left + (at + 0.5) * step
            (colour,) = [
                of for x, top, width, _, of in found if top == y and x < middle < x + width
            ]
            low, high = dict(zip(COLOURS, pairwise((-1.0, *BOUNDS, 99.0)), strict=True))[colour]
            assert low <= share < high
    assert all(b - a >= height for a, b in pairwise(sorted(ys)))


def boxes(path: Path) -> list[tuple[float, float, float, float, str]]:
    """Left, top, width, height and colour of each."""
    pattern = re.compile(r"M([\d.]+) ([\d.]+)H([\d.]+)v([\d.]+)H([\d.]+)z")
    return [
        (
            float(x),
            float(y),
            float(end) - float(x),
            float(height),
            each.attrib["class"].removeprefix("c"),
        )
        for each in ET.parse(path).getroot().iter(f"{SVG}path")
        for x, y, end, height, _ in pattern.findall(each.attrib["d"])
    ]


def test_the_lines_are_the_extremes_of_all_layers(run: Path, tmp_path: Path) -> None:
    """On a scale of powers of two, where nothing is the least power."""
    assert main(["loads", str(run), "--svg", str(tmp_path / "a.svg")]) == 0
    root = ET.parse(tmp_path / "a.svg").getroot()
    ticks = {
        text.text: float(text.attrib["y"]) - 4 for text in reversed([*root.iter(f"{SVG}text")])
    }
    lines = [
        path.attrib["d"]
        for path in root.iter(f"{SVG}path")
        if path.attrib["class"].startswith("trace")
    ]
    most, least = ([float(y) for y in line.removeprefix("M").split()[1::2]] for line in lines)
    assert most[:2] == [ticks["4"], ticks["2"]]
    assert least[0] == ticks["1/16"]
    assert ticks["1"] > most[2] > ticks["2"]
    assert ticks["1"] < least[2] < ticks["1/2"]


def test_a_long_run_of_many_experts_is_no_large_file(tmp_path: Path) -> None:
    load = [[(expert * layer * 7) % 13 + 1 for expert in range(64)] for layer in range(24)]
    records = [
        {"step": step, "expert_load": [row[step % 64 :] + row[: step % 64] for row in load]}
        for step in range(400)
    ]
    assert (
        main(["loads", str(write(tmp_path / "long", [*records])), "--svg", str(tmp_path / "a.svg")])
        == 0
    )
    assert (tmp_path / "a.svg").stat().st_size < 12_000_000
    assert len({x for x, *_ in boxes(tmp_path / "a.svg")}) <= 200_000 // (24 * 64)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read"),
        (
            '{"step": 1, "loss": 2.0}\n',
            "has no loads of experts: the plan has no `route`, or no step is logged yet",
        ),
        ("loss 2.0\n", "is no log of a run: a line of it is no record of a step"),
        ('{"expert_load": 5}\n', "is no log of a run: a line of it is no record of a step"),
    ],
)
def test_what_is_no_log(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "log.jsonl").write_text(content)
    assert main(["loads", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_file_of_another_hand_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.svg").write_text("<svg/>")
    assert main(["loads", str(run), "--svg", str(tmp_path / "a.svg")]) == 2
    assert "was not written by scalec" in capsys.readouterr().err
    assert (tmp_path / "a.svg").read_text() == "<svg/>"


def test_what_a_capacity_dropped_is_in_the_table_and_the_picture() -> None:
    lines = [{"step": step, "expert_load": [[3, 1]], "dropped": step / 100} for step in (1, 25)]
    found = parse_log("tiny", "\n".join(map(json.dumps, lines)))
    assert found
    assert "dropped   1.0%   25.0%" in re.sub(" {3,}", "   ", text(found))
    assert svg(found).count('class="trace') == 3
    lines[0].pop("dropped")  # a log that began without
    found = parse_log("tiny", "\n".join(map(json.dumps, lines)))
    assert found
    assert svg(found).count('class="trace') == 2
