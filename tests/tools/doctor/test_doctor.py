"""`scalec doctor`: what it makes of the reports of many ranks, and whole looks at machines, of
one node and of two.
"""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.launched import run_file
from scalec.tools.doctor.__main__ import main
from scalec.tools.doctor.checks import FAIL, OK, WARN, Finding, findings
from scalec.tools.doctor.report import Needs, Report

GIB, NEAR, WORLD = 2**30, 8, 2048
VERSIONS = {
    "python": "3.11.7",
    "scalec": "0.1.0",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "NCCL": "2.27.5",
}
NEEDS = Needs(
    written_by="scalec 0.1.0",
    name="llama",
    nodes=WORLD // NEAR,
    least=WORLD // NEAR,
    ranks=WORLD,
    ranks_per_node=NEAR,
    device="cuda",
    gpu="h100_sxm",
    gpu_memory=80 * GIB,
    memory=60 * GIB,
    host=20 * GIB,
    checkpoint=90 * GIB,
    links=[{"name": "node", "bandwidth": 360e9}, {"name": "network", "bandwidth": 400e9}],
    files=["data/*.bin"],
)


def _report(rank: int) -> Report:
    return Report(
        rank=rank,
        near=NEAR,
        node=f"node{rank // NEAR}",
        versions=VERSIONS,
        gpu_count=NEAR,
        gpus=[(rank % NEAR, H100, 79 * GIB, 79 * GIB)],
        cpus=128,
        threads="8",
        open_files=65536,
        shared_memory=500 * GIB,
        free_memory=900 * GIB,
        free_disk=1000 * GIB,
        data="12 files of 100 bytes, abc",
        port=4000,
        seen=[*range(WORLD)],
        clock=0.001 * (rank // NEAR % 7),
        rates={"node": 340e9, "network": 45e9},
    )


H100 = "NVIDIA H100 80GB HBM3"
REPORTS = [_report(rank) for rank in range(WORLD)]


def _found(reports: list[Report], needs: Needs = NEEDS) -> list[Finding]:
    return [each for each in findings(needs, reports, WORLD) if each.level != OK]


def _with(rank: int, **changes: Any) -> list[Report]:
    """The reports with changes in those of a rank's node."""
    own = range(rank // NEAR * NEAR, rank // NEAR * NEAR + NEAR)
    return [replace(report, **changes) if report.rank in own else report for report in REPORTS]


def test_a_healthy_cluster_is_all_ok() -> None:
    found = findings(NEEDS, REPORTS, WORLD)
    assert {each.level for each in found} == {OK}
    told = "\n".join(map(str, found))
    assert "2,048 ranks on 256 nodes" in told
    assert "within nodes 340.00 GB/s of the table's 360.0" in told
    # of a node: eight ranks send at once
    assert "between nodes 360.00 GB/s of the table's 400.0" in told
    assert "at most 0.00 s apart" in told


ONE: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"versions": {**VERSIONS, "torch": "2.12.1"}},
        FAIL,
        "versions",
        "torch is 2.13.0 on ranks `0`, `1`, `2` and",
    ),
    ({"versions": {**VERSIONS, "python": "3.12.1"}}, WARN, "versions", "python is 3.11.7 on ranks"),
    ({"clock": 3.5}, WARN, "clocks", "at most 3.50 s apart, on node2"),
    ({"clock": -20.0}, FAIL, "clocks", "at most 20.00 s apart, on node2"),
    ({"gpu_count": 7}, FAIL, "GPUs", "node2 has 7 GPUs, the plan takes 8"),
    (
        {"gpus": [(0, "NVIDIA A100-SXM4-80GB", 79 * GIB, 79 * GIB)]},
        FAIL,
        "GPUs",
        "GPU 0 of node2: NVIDIA A100-SXM4-80GB, the plan is for h100_sxm",
    ),
    (
        {"gpus": [(7, H100, 79 * GIB, 9 * GIB)]},
        FAIL,
        "GPUs",
        "GPU 7 of node2: 9.0 GiB of memory free, a step takes 60.0",
    ),
    (
        {"rates": {"node": 200e9, "network": 45e9}},
        WARN,
        "links",
        "at least 200.00, of rank 16 on node2",
    ),
    (
        {"rates": {"node": 340e9, "network": 5e9}},
        FAIL,
        "links",
        "at least 40.00, of rank 16 on node2",
    ),
    ({"links": "connection refused"}, FAIL, "links", "rank 16 on node2: connection refused"),
    (
        {"unreachable": "10.0.0.9:4000: timed out"},
        FAIL,
        "ports",
        "node2 does not reach 10.0.0.9:4000: timed out",
    ),
    (
        {"folder": "Read-only file system"},
        FAIL,
        "run folder",
        "node2 cannot write to it: Read-only file system",
    ),
    ({"seen": [*range(16, 24)]}, FAIL, "run folder", "not all files are seen on `node2`"),
    ({"free_disk": 100 * GIB}, FAIL, "disk", "100.0 GiB free, 3 checkpoints take 270.0"),
    (
        {"data": "11 files of 90 bytes, abd"},
        FAIL,
        "data",
        "it is 12 files of 100 bytes, abc on ranks",
    ),
    (
        {"data": "no data: `data/*.bin` matches no file"},
        FAIL,
        "data",
        "node2: no data: `data/*.bin` matches",
    ),
    (
        {"open_files": 1024},
        WARN,
        "open files",
        "1,024 may be open, a rank takes up to 8,448, on node2",
    ),
    (
        {"free_memory": 100 * GIB},
        WARN,
        "host memory",
        "node2 has 100 GiB free, 8 ranks take up to 160",
    ),
    ({"shared_memory": 64 * 2**20}, WARN, "host memory", "/dev/shm of node2 has 64 MiB"),
    ({"threads": "64"}, WARN, "threads", "OMP_NUM_THREADS=64 for 8 ranks, but node2 has 128 CPUs"),
]


@pytest.mark.parametrize(("change", "level", "about", "said"), ONE)
def test_what_is_wrong_with_one_node_of_256_is_one_line_with_its_name(
    change: dict[str, Any], level: str, about: str, said: str
) -> None:
    found = _found(_with(19, **change))
    assert {(each.level, each.about) for each in found} == {(level, about)}
    assert said in found[0].said
    assert all(each.help for each in found)


def test_ranks_that_do_not_come_are_named() -> None:
    (found, *others) = _found(REPORTS[:2040])
    assert (found.level, found.about) == (FAIL, "ranks")
    assert found.said == "2,040 ranks on 255 nodes; missing: `2040`, `2041`, `2042` and 5 more"
    assert {each.about for each in others} <= {"run folder"}


def test_a_plan_that_needs_more_memory_than_a_gpu_has() -> None:
    found = _found(REPORTS, replace(NEEDS, memory=100 * GIB))
    assert len(found) == WORLD
    assert "79.0 GiB of memory, a step takes 100.0" in found[0].said
    assert _found(REPORTS, replace(NEEDS, written_by="scalec 0.0.9"))[0].said == (
        "compiled by scalec 0.0.9, here is scalec 0.1.0"
    )


@pytest.mark.parametrize(
    ("gpu", "name"), [("rtx_4090", "NVIDIA GeForce RTX 4090"), ("l40s", "NVIDIA L40S")]
)
def test_gpus_are_known_by_the_names_that_plans_have(gpu: str, name: str) -> None:
    reports = [replace(report, gpus=[(0, name, 79 * GIB, 79 * GIB)]) for report in REPORTS]
    assert _found(reports, replace(NEEDS, gpu=gpu)) == []


def test_a_report_and_needs_read_back(tmp_path: Path) -> None:
    again = Report.read(REPORTS[3].text())
    assert findings(NEEDS, [again, *REPORTS], WORLD) == findings(
        NEEDS, [REPORTS[3], *REPORTS], WORLD
    )
    (path := tmp_path / "needs.json").write_text(json.dumps({"ranks": 4, "device": "cpu"}))
    assert Needs.read(path) == Needs(ranks=4, device="cpu")


def test_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {each["level"] for each in said["findings"]} <= {OK, WARN}
    assert [rank["seen"] for rank in said["ranks"]] == [[0]]
    assert [*tmp_path.iterdir()] == [], "it leaves nothing"
    (tmp_path / "needs.json").write_text(
        json.dumps({"device": "cuda", "ranks_per_node": 8, "checkpoint": 1 << 60})
    )
    assert main(["needs.json"]) == 1
    told = capsys.readouterr().out
    assert f"{socket.gethostname()} has 0 GPUs, the plan takes 8" in told
    assert "3 checkpoints take 3221225472.0" in told


PROGRAM = """
import os, socket, sys
from scalec.tools.doctor.__main__ import main
os.environ["LOCAL_WORLD_SIZE"] = "1"
socket.gethostname = lambda: f"node{os.environ['RANK']}"
%s
sys.exit(main(sys.argv[1:]))
"""


def _two_nodes(folder: Path, change: str = "") -> tuple[list[int], str]:
    """Exit statuses and the text of rank 0, of two ranks that take themselves for two nodes."""
    (folder / "train.py").write_text(PROGRAM % change)
    (folder / "needs.json").write_text(
        json.dumps({"device": "cpu", "ranks": 2, "nodes": 2, "name": "tiny"})
    )
    ended = run_file(folder, 2, "needs.json --out runs/tiny")
    assert (folder / "out1").read_text() == ""
    return [status for status, _ in ended], (folder / "out0").read_text()


def test_two_nodes_look_at_each_other(tmp_path: Path) -> None:
    statuses, told = _two_nodes(tmp_path)
    assert statuses == [0, 0], told
    for words in (
        "2 ranks on 2 nodes",
        "s apart",
        "between nodes",
        "reaches its neighbour",
        "see each other's files",
    ):
        assert words in told
    assert not (tmp_path / "runs/tiny").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "sys.argv[1], other = os.path.abspath(sys.argv[1]), f\"other{os.environ['RANK']}\"\n"
            "os.makedirs(other)\nos.chdir(other)",
            "not all files are seen on `node0`, `node1`",
        ),
        (
            "import scalec.tools.doctor.job as job\n"
            "if os.environ['RANK'] == '1': job.time.time = lambda at=job.time.time: at() + 60",
            "s apart, on node",
        ),
        (
            "import scalec.tools.doctor.job as job\njob._own_address = lambda:"
            " '127.0.0.1:0'\n"
            "job._CONNECTING = 0.5",
            "does not reach 127.0.0.1",
        ),
    ],
)
def test_what_is_wrong_between_two_nodes(change: str, said: str, tmp_path: Path) -> None:
    statuses, told = _two_nodes(tmp_path, change)
    assert statuses == [1, 1]
    (line,) = [line for line in told.splitlines() if line.startswith("fail")]
    assert said in line


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    change = "import scalec.tools.doctor.job as job\nfrom datetime import timedelta\n"
    change += (
        "job.PATIENCE = job.PARTING = timedelta(seconds=0.5)\nif os.environ['RANK'] == '1':"
        " sys.exit(7)"
    )
    statuses, told = _two_nodes(tmp_path, change)
    assert statuses == [1, 7]
    assert "fail  ranks           1 rank on 1 node; missing: `1`\n" in told
