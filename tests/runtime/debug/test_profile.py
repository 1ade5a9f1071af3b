"""The files of SCALEC_PROFILE: whose line each op of forward and backward is, in a trace that
viewers can read.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import bigram
from helpers.launched import run_recorded, text_files
from helpers.programs import import_module
from scalec.runtime import Batch, Constant, Mesh
from scalec.runtime.config.environment import Profiled
from scalec.runtime.debug.profile import Profiler
from scalec.runtime.debug.trace import add_lines

PLAN = replace(bigram.PLAN, schedule=Constant(warmup=0))
GOLDEN = Path(__file__).parents[2] / "golden"
BACKWARD = "backward of "


def _run(folder: Path, options: str = "") -> list[tuple[int, str]]:
    text_files(folder)
    options = f"--data text/*.txt --log-every 1 {options}"
    return run_recorded(
        folder, PLAN, bigram.build, bigram.train_step, bigram.eval_step, options, record=""
    )


def _losses(folder: Path) -> list[tuple[Any, ...]]:
    lines = [
        json.loads(line) for line in (folder / "runs/bigram/log.jsonl").read_text().splitlines()
    ]
    return [
        tuple(value for name, value in line.items() if not name.startswith("tokens_per_s"))
        for line in lines
    ]


def _spans(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    return sorted(spans, key=lambda span: span["ts"])


@pytest.mark.long
def test_a_run_writes_the_steps_that_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which it may have fewer."""
    assert _run(tmp_path / "off") == [(0, ""), (0, "")]
    monkeypatch.setenv("SCALEC_PROFILE", "profiled")
    monkeypatch.setenv("SCALEC_PROFILE_STEPS", "3-9")
    assert [status for status, _ in _run(tmp_path)] == [0, 0]
    for rank in (0, 1):
        names = [span["name"] for span in _spans(tmp_path / f"profiled/rank{rank:05}.json")]
        codes = Counter(name.partition("  ")[2] for name in names if name.startswith("bigram.py:"))
        assert [name for name in names if name.startswith("step ")] == ["step 3", "step 4"]
        assert names.count("Bigram") == 2
        assert codes["part = model(tokens, labels)"] == codes["(part / count).backward()"] == 2
        assert codes["norm = sum_squares(all_reduce_(state.gradients()['dp'], dp)).sqrt()"] == 2
        _check_sums(tmp_path / f"profiled/rank{rank:05}.json")
    assert _losses(tmp_path) == _losses(tmp_path / "off")


def _check_sums(path: Path) -> None:
    """The sums by line, beside a trace of two steps, are those of its steps; ranks wait for
    each other.
    """
    sums, (norm, *_) = (
        json.loads(path.with_name(f"{path.stem}-lines.json").read_text()),
        _spans_of(path, "norm = "),
    )
    steps = [span["dur"] for span in _spans_of(path, "step ")]
    assert (sums["device"], sums["steps"]) == ("cpu", 2)
    assert sums["seconds"] == pytest.approx(sum(steps) / 2e6)
    assert sums["seconds"] == pytest.approx(
        sum(sum(kinds.values()) for kinds in sums["lines"].values())
    )
    assert sums["lines"][norm["name"].partition("  ")[0]]["exposed"] > 0


def _spans_of(path: Path, code: str) -> list[dict[str, Any]]:
    """The spans of a name, or of a line of code."""
    return [
        span
        for span in _spans(path)
        if span["name"].partition("  ")[2].startswith(code) or span["name"].startswith(code)
    ]


@pytest.mark.parametrize("steps", ["3", "0-1", "5-3", "-3", "3-", "a-b"])
def test_steps_that_are_none(steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEC_PROFILE", "profiled")
    monkeypatch.setenv("SCALEC_PROFILE_STEPS", steps)
    message = (
        f"error: SCALEC_PROFILE_STEPS is `{steps}`: write the first and the last step of the"
        " run, as in 3-5\n"
    )
    assert _run(tmp_path) == [(2, message), (2, "")]


def test_steps_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEC_PROFILE_STEPS", "3-5")
    message = (
        "error: SCALEC_PROFILE_STEPS=3-5 says which steps are profiled: it needs"
        " SCALEC_PROFILE=FOLDER\n"
    )
    assert _run(tmp_path) == [(2, message), (2, "")]


def test_steps_that_a_run_does_not_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEC_PROFILE", "profiled")
    message = "error: SCALEC_PROFILE asks for step 3 of this run, which has 2\n"
    assert _run(tmp_path, "--steps 2") == [(2, message), (2, "")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a step of a golden program on one rank."""
    folder = tmp_path_factory.mktemp("profiled")
    module = import_module(GOLDEN / "one_rank/train.py")
    model, state = module.build(Mesh(module.PLAN.mesh))
    state.initialise(seed=0)
    size = (module.PLAN.microbatches, 2, module.PLAN.seq)
    tokens = torch.randint(256, size, generator=torch.Generator().manual_seed(0))
    with Profiler(Profiled(folder, 2, 2), model, torch.device("cpu"), first=10) as profiler:
        step = profiler.of(module.train_step)
        for _ in range(3):
            step(model, state, Batch(tokens, tokens), 1e-3)
    return folder / "rank00000.json"


def test_lines_of_the_plan_in_forward_and_backward(path: Path) -> None:
    spans = _spans(path)
    lines = [span["name"].partition("  ")[0] for span in spans]
    microbatches, layer = 4, [f"llama.scale:{number}" for number in (21, 22, 23, 24, 25, 27, 28)]
    forward = [line for line in lines if line.startswith("llama.scale:")]
    around = ["llama.scale:20", *layer]
    assert forward == ["llama.scale:19", *around, *around, "llama.scale:30"] * microbatches
    backward = [
        line.removeprefix(BACKWARD) for line in lines if line.startswith(f"{BACKWARD}llama.scale:")
    ]
    layers = ["llama.scale:30", *layer[::-1], *layer[::-1], "llama.scale:19"]
    assert backward == layers * microbatches
    assert [
        span["name"] for span in spans if span["name"].startswith(("step ", "layers.", "Llama"))
    ] == [
        "step 12",
        *["Llama", "layers.0", "layers.1"] * microbatches,
    ]


def test_each_op_says_its_line(path: Path) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    ops = Counter((e["name"], e["args"].get("line")) for e in events if e.get("cat") == "cpu_op")
    assert ops["aten::embedding", "llama.scale:19"] == 4
    assert ops["aten::embedding_dense_backward", "llama.scale:19"] == 4
    assert (
        ops["aten::silu", "llama.scale:28"] == ops["aten::silu_backward", "llama.scale:28"] == 4 * 2
    )
    # x·w, dy·wᵀ, dyᵀ·x
    assert ops["aten::mm", "llama.scale:24"] == 3 * ops["aten::silu", "llama.scale:28"]
    assert sum(count for (name, _), count in ops.items() if name == "aten::mm") == 3 * (7 * 8 + 4)


def test_spans_of_a_thread_are_nested(path: Path) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    timed = [
        e for e in events if e.get("ph") == "X" and e.get("cat") in ("user_annotation", "cpu_op")
    ]
    assert len(timed) > 1000
    for _, of_thread in groupby(sorted(timed, key=_place), key=lambda e: (e["pid"], e["tid"])):
        assert not list(_crossing(list(of_thread)))


def _place(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["pid"], event["tid"], event["ts"], -event["dur"]


def _crossing(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    around: list[dict[str, Any]] = []
    for event in events:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if around and around[-1]["ts"] + around[-1]["dur"] < event["ts"] + event["dur"] - 0.002:
            yield around[-1]["name"], event["name"]
        around.append(event)


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_a_step_that_fails_is_no_longer_traced(tmp_path: Path) -> None:
    model = bigram.Bigram(Mesh({"dp": 1}))
    before = sys.gettrace()
    with Profiler(Profiled(tmp_path, 1, 1), model, torch.device("cpu"), first=0) as profiler:
        step = profiler.of(model)
        with pytest.raises(TypeError):
            step(None, None)
    assert sys.gettrace() is before


def _event(
    name: str, thread: int, ts: float, dur: float, cat: str = "cpu_op", external: int | None = None
) -> dict[str, Any]:
    args = {} if external is None else {"External id": external}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def _arrow(end: str, number: int, thread: int, ts: float) -> dict[str, Any]:
    return {
        "ph": end,
        "cat": "fwdbwd",
        "name": "fwdbwd",
        "id": number,
        "pid": 1,
        "tid": thread,
        "ts": ts,
    }


def test_backward_in_a_thread_of_its_own_and_kernels() -> None:
    """As on CUDA, where autograd runs backward in another thread, and a stream has kernels."""
    node = "autograd::engine::evaluate_function: "
    events = [
        _event("a.scale:3  y = x @ w", 1, 0, 10, "user_annotation"),
        _event("aten::mm", 1, 2, 3, external=1),
        _arrow("s", 7, 1, 2),
        _event("a.scale:4  z = relu(y)", 1, 10, 5, "user_annotation"),
        _event("aten::relu", 1, 12, 1, external=2),
        _arrow("s", 8, 1, 12),
        _event("gemm", 99, 50, 9, "kernel", external=1),
        _event(f"{node}ReluBackward0", 2, 100, 5, external=3),
        _arrow("f", 8, 2, 101),
        _event(f"{node}MmBackward0", 2, 105, 5, external=4),
        _arrow("f", 7, 2, 106),
        _event("aten::mm", 2, 107, 1, external=5),
        _event(f"{node}torch::autograd::AccumulateGrad", 2, 110, 2, external=6),
        _event("gemm", 99, 150, 9, "kernel", external=5),
        _event(f"{node}Unknown", 2, 120, 2, external=7),
    ]
    add_lines(
        {"traceEvents": events},
        {"a.scale:3  y = x @ w": "a.scale:3", "a.scale:4  z = relu(y)": "a.scale:4"},
    )
    assert [event["args"].get("line") for event in events if event["name"] == "gemm"] == [
        "a.scale:3"
    ] * 2
    assert [
        (e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["name"].startswith(BACKWARD)
    ] == [
        ("backward of a.scale:4  z = relu(y)", 2, 100, 5),
        ("backward of a.scale:3  y = x @ w", 2, 105, 7),
    ]
    assert (
        "line" not in next(event for event in events if event["name"] == f"{node}Unknown")["args"]
    )


@pytest.mark.gpu
def test_on_a_gpu_kernels_have_lines_and_memory_a_snapshot(tmp_path: Path) -> None:
    device = torch.device("cuda")
    mesh = Mesh({"dp": 1}, device)
    model, state = bigram.build(mesh)
    state.initialise(seed=0)
    tokens = torch.zeros(1, 2, 8, dtype=torch.int64, device=device)
    with Profiler(Profiled(tmp_path, 2, 2), model, device, first=0) as profiler:
        step = profiler.of(bigram.train_step)
        for _ in range(3):
            step(model, state, Batch(tokens, tokens), 0.1)
    events = json.loads((tmp_path / "rank00000.json").read_text())["traceEvents"]
    lines = {event["args"].get("line") for event in events if event.get("cat") == "kernel"}
    assert len([line for line in lines if line and line.startswith("bigram.py:")]) > 3
    assert (tmp_path / "rank00000-memory.pickle").stat().st_size > 0
