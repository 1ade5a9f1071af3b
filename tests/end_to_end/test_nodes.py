"""Nodes that differ in data, files of weights or state: each difference is named within the first
steps.

Each rank is a node of its own, with a working folder of its own; nodes that are alike train as
ever.
"""

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from math import prod
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import scalec
from helpers import hf_models
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import SEQ, Case, plan_text
from helpers.programs import load_program, write_program
from scalec.runtime import Mesh, RunError
from scalec.runtime.checkpoint.hf_weights import Reader
from scalec.runtime.data.files import split_files
from scalec.runtime.data.mixture import Mixture, Part, Stream
from scalec.runtime.train.same_state import SameState
from scalec.testing.faults import Fault, Flip, Outcome, Point, Program, fork

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = "--device=cpu --log-every=1 --out=../run"
# longer than the ends that are hashed at the start
BYTES, DAMAGED = 200_000, range(70_000, 130_000)
LINE = re.compile(
    r"error: step (\d+): the data differs between rank (\d) on \S+ and rank (\d) on \S+,"
    r" in sample (\d+): \S+, tokens ([\d,]+) to ([\d,]+)\n"
)


def _write_corpus(folder: Path, damaged: range = range(0)) -> None:
    folder.mkdir(exist_ok=True)
    text = bytearray(place * 7 % 31 + 1 for place in range(BYTES))
    text[damaged.start : damaged.stop] = bytes(len(damaged))
    (folder / "corpus.bin").write_bytes(text)


def _run(
    folder: Path,
    ranks: int,
    options: str,
    *faults: Fault,
    nodes: bool = True,
    program: str = "../train.py",
) -> Outcome:
    """Each rank in its folder `r0`, `r1`, …, as on nodes that share the folder of the run alone.

    Without `nodes` they say that they are ranks of one machine.
    """

    def main() -> None:
        if nodes:
            os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "0"
        os.chdir(f"r{os.environ['RANK']}")
        sys.argv[0] = program
        sys.path.insert(0, str(Path(program).absolute().parent))
        run_path(sys.argv[0], run_name="__main__")

    with fork(Program(folder, ranks, f"{OPTIONS} {options}"), *faults, main=main) as job:
        return job.wait(120)


# ---- data

DATA = {
    "tensors": Case(tp=2),
    "stages": Case(pp=2, microbatches=2),
    "data": Case(dp=2),
    "data and tensors": Case(dp=2, tp=2, sp=True),
    "context": Case(cp=2, how="via ring"),
    "experts": Case(dp=2, model="two", experts="dp"),
    "sharded state": Case(dp=2, state="zero 3 over dp"),
    "three nodes": Case(dp=3),
}
PLAIN = ("tensors", "stages", "data", "context")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", DATA)
def test_data_that_is_damaged_on_one_node_is_named(kind: str, tmp_path: Path) -> None:
    case = DATA[kind]
    write_program(plan_text(case), tmp_path)
    last = case.ranks - 1
    for rank in range(case.ranks):
        _write_corpus(tmp_path / f"r{rank}", DAMAGED if rank == last else range(0))
    ended = _run(tmp_path, case.ranks, "--data=corpus.bin --data-as-is --steps=12")
    assert {*ended.statuses} == {1}, ended.err
    step, one, other, sample, start, stop = _line(ended)
    assert last in (one, other)
    assert step <= 8
    assert sample // case.rows < step, "no sample of a step to come"
    assert range(max(start, DAMAGED.start), min(stop, DAMAGED.stop)), (
        "its tokens are not those of the damage"
    )
    assert not (tmp_path / "run" / "checkpoints").exists()


def _line(ended: Outcome) -> tuple[int, ...]:
    """The numbers of the one line that says what differs."""
    (found,) = LINE.findall("".join(ended.err))
    return tuple(int(number.replace(",", "")) for number in found)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", PLAIN)
def test_data_that_is_alike_is_trained_on(kind: str, tmp_path: Path) -> None:
    case = DATA[kind]
    write_program(plan_text(case), tmp_path)
    for rank in range(case.ranks):
        _write_corpus(tmp_path / f"r{rank}")
    ended = _run(tmp_path, case.ranks, "--data=corpus.bin --data-as-is --steps=12 --save-every=5")
    assert {*ended.statuses} == {0}, ended.err


@pytest.mark.long
def test_damage_after_the_first_steps_is_named_before_the_run_ends(tmp_path: Path) -> None:
    """Of a run that goes on: its first windows are good, and one of its last, between two
    comparisons, is not.
    """
    case = DATA["tensors"]
    write_program(plan_text(case), tmp_path)
    for rank in range(2):
        _write_corpus(tmp_path / f"r{rank}")
    ended = _run(tmp_path, 2, "--data=corpus.bin --data-as-is --steps=4")
    assert {*ended.statuses} == {0}, ended.err
    window = next(
        start
        for step in range(9, 14)
        for start in _windows(tmp_path, step, case)
        if start in DAMAGED
    )
    _write_corpus(tmp_path / "r1", range(window + 2, window + 4))
    ended = _run(tmp_path, 2, "--data=corpus.bin --data-as-is --steps=15 --resume-anyway")
    assert {*ended.statuses} == {1}, ended.err
    step, *_, start, stop = _line(ended)
    assert (step, start, stop) == (15, window, window + SEQ + 1)


def _windows(folder: Path, step: int, case: Case) -> list[int]:
    """The first tokens of the samples of a step, from 0."""
    stream = Stream([str(folder / "r0" / "corpus.bin")], torch.uint8, SEQ + 1)
    mixture = Mixture([Part("", stream)])
    places = [mixture.place_of_window(step * case.rows + row, seed=3) for row in range(case.rows)]
    return [int(words.split(" tokens ")[1].split()[0].replace(",", "")) for words in places]


def test_held_out_data_that_is_damaged_on_one_node_is_named(tmp_path: Path) -> None:
    """Of the two files the one that is trained on is good."""
    case = DATA["tensors"]
    write_program(plan_text(case).replace("tokenizer", "holdout = 5%  tokenizer"), tmp_path)
    for rank in range(2):
        _write_corpus(tmp_path / f"r{rank}")
        for name in ("a.bin", "b.bin"):
            shutil.copy(tmp_path / f"r{rank}" / "corpus.bin", tmp_path / f"r{rank}" / name)
    _write_corpus(tmp_path / "r1", DAMAGED)
    held = _held_out(tmp_path / "r0")
    shutil.move(tmp_path / "r1" / "corpus.bin", tmp_path / "r1" / held)
    ended = _run(tmp_path, 2, "--data=[ab].bin --data-as-is --steps=4 --eval-every=2")
    assert {*ended.statuses} == {1}, ended.err
    assert f"{held}, tokens " in "".join(ended.err)
    _line(ended)


def _held_out(folder: Path) -> str:
    _, (held,) = split_files([str(folder / "a.bin"), str(folder / "b.bin")], 0.05)
    return Path(held).name


# ---- programs


def test_functions_of_user_ops_that_differ_on_one_node_are_named(tmp_path: Path) -> None:
    scalec.plan(EXAMPLES / "05_user_op.scale").write(tmp_path / "r0")
    _write_corpus(tmp_path / "r0")
    ranks = prod(json.loads((tmp_path / "r0" / "plan.json").read_text())["mesh"].values())
    for rank in range(1, ranks):
        shutil.copytree(tmp_path / "r0", tmp_path / f"r{rank}")
    module = tmp_path / f"r{ranks - 1}" / "my_ops.py"
    module.write_text(module.read_text() + "\n# another revision\n")
    ended = _run(tmp_path, ranks, "--data=corpus.bin --data-as-is --steps=2", program="train.py")
    assert {*ended.statuses} == {2}
    assert (
        f"error: the ranks are not alike\n  rank {ranks - 1} has my_ops.py sha256 " in ended.err[0]
    ), ended.err[0]


# ---- files of weights


@dataclass(frozen=True)
class Weights:
    """A model on a mesh, and the tensor that the last node has another revision of."""

    model: str
    mesh: str
    dp: int
    ranks: int
    tensor: str
    sections: str = ""


WEIGHTS = {
    "replicas": Weights("llama", "dp = 2  tp = 1", 2, 2, "lm_head.weight"),
    "sharded state": Weights(
        "llama", "dp = 2  tp = 1", 2, 2, "lm_head.weight", "state { zero 3 over dp }"
    ),
    "tensors": Weights("llama", "dp = 1  tp = 2", 1, 2, "model.layers.1.mlp.down_proj.weight"),
    "joined, padded": Weights("gpt2", "dp = 1  tp = 2", 1, 2, "transformer.h.1.attn.c_attn.weight"),
    "stages": Weights(
        "llama", "pp = 2  dp = 1  tp = 1", 1, 2, "lm_head.weight", "pipeline { schedule = 1f1b }"
    ),
    "experts": Weights(
        "mixtral", "dp = 2  tp = 1", 2, 2, ".layers.1.block_sparse_moe.experts.3.w2"
    ),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_of_another_revision_on_one_node_are_named(
    kind: str, differs: bool, tmp_path: Path
) -> None:
    given = WEIGHTS[kind]
    hf_models.model(given.model, torch.float64).save_pretrained(tmp_path / "r0")
    for rank in range(1, given.ranks):
        shutil.copytree(tmp_path / "r0", tmp_path / f"r{rank}")
    names = load_file(tmp_path / "r0" / "model.safetensors")
    tensor = next(name for name in names if given.tensor in name)
    if differs:
        _change(tmp_path / f"r{given.ranks - 1}" / "model.safetensors", tensor)
    text = hf_models.plan(tmp_path / "r0", given.mesh, given.dp) + given.sections
    text = text.replace("shard {", "shard { layers over pp") if "pp" in given.mesh else text
    module = load_program(text, tmp_path / "program")
    lines = run_ranks(given.ranks, _fill, module, tmp_path)
    if differs:
        (line,) = {*lines}
        ranks = r"rank \d on \S+ and rank \d on \S+"
        assert re.match(rf"`{re.escape(tensor)}` of \S+ differs between {ranks}\n", line), line
    else:
        assert lines == [""] * given.ranks


def _change(file: Path, tensor: str) -> None:
    """Another last bit of one value of each row: no sum, and no value at an end, need differ."""
    tensors = load_file(file)
    tensors[tensor].view(torch.int64)[..., 1] ^= 1
    save_file(tensors, file, {"format": "pt"})


def _fill(module: ModuleType, folder: Path) -> str:
    _, state = module.build(Mesh(module.PLAN.mesh))
    try:
        Reader(folder / f"r{dist.get_rank()}", module.PLAN.names).fill(state)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("nodes", [True, False])
def test_a_run_does_not_begin_with_weights_that_differ(nodes: bool, tmp_path: Path) -> None:
    """Ranks of one machine do not look at each other's files, but at what they hold alike."""
    hf_models.model("llama", torch.float32).save_pretrained(tmp_path / "r0" / "w")
    write_program(hf_models.plan(tmp_path / "r0" / "w", "dp = 2  tp = 1", 2, "fp32"), tmp_path)
    _write_corpus(tmp_path / "r0")
    shutil.copytree(tmp_path / "r0", tmp_path / "r1")
    tensors = load_file(tmp_path / "r1" / "w" / "model.safetensors")
    tensors["lm_head.weight"][5, 7] += 1
    save_file(tensors, tmp_path / "r1" / "w" / "model.safetensors", {"format": "pt"})
    ended = _run(tmp_path, 2, "--data=corpus.bin --data-as-is --steps=2 --init w", nodes=nodes)
    assert {*ended.statuses} == {1}
    start = "" if nodes else "before the first step ranks do not hold the same state: "
    name = "`lm_head.weight` of w" if nodes else "`head`"
    said = "".join(ended.err)
    assert re.search(
        rf"error: {start}{name} differs between rank \d on \S+ and rank \d on ", said
    ), said
    assert not (tmp_path / "run" / "checkpoints").exists()


# ---- what ranks hold alike

STATE = {
    "replicas": Case(dp=2, optimizer="adamw"),
    "tensors": Case(dp=2, tp=2, optimizer="momentum"),
    "replicated in tensors": Case(tp=2),
    "sharded state": Case(dp=2, tp=2, optimizer="adamw", state="zero 1 over dp"),
    "hybrid": Case(replicas=2, dp=2, optimizer="adamw", state="zero 3 over dp"),
    "masters": Case(dp=2, precision="bf16", optimizer="adamw"),
    "tied over stages": Case(pp=2, model="tied", microbatches=2),
    "stages": Case(pp=2, dp=2, optimizer="adamw", microbatches=2),
    "experts": Case(dp=2, tp=2, model="biased", experts="dp"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", STATE)
def test_a_bit_of_what_ranks_hold_alike_is_named(kind: str, tmp_path: Path) -> None:
    case = STATE[kind]
    for lines in run_ranks(case.ranks, _flipped, harness.load_case(case, tmp_path)):
        assert lines[0] == ""
        for name, line in lines[1:]:
            assert line.startswith(
                f"before the first step ranks do not hold the same state: `{name}` differs between"
            )
            assert f"rank {case.ranks - 1} on " in line


def _flipped(module: Any) -> list[Any]:
    """The line of an undisturbed state; then, for each box that two ranks hold, its name and what a
    flipped bit gives.

    Which boxes these are is found from all ranks' boxes, and must be what the state says.
    """
    _, state = module.build(Mesh(module.PLAN.mesh))
    state.initialise(0)
    names = {box.name for box in state.boxes() if box.tensor.numel()}
    world = dist.get_world_size()
    every: list[Any] = [None] * world
    dist.all_gather_object(every, names)
    shared = {name for name in names if sum(name in others for others in every) > 1}
    said = {
        box.name
        for boxes in state.get_boxes_by_axes().values()
        for box in boxes
        if box.tensor.numel()
    }
    assert said == shared
    check = SameState(state)
    lines: list[Any] = [_state_line(check)]
    for name in sorted(name for name in every[-1] if sum(name in others for others in every) > 1):
        is_last = dist.get_rank() == world - 1
        if is_last:
            _flip(state, name)
        lines.append((name, _state_line(check)))
        if is_last:
            _flip(state, name)
    return lines


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", STATE)
def test_plan_json_says_what_is_compared(kind: str, tmp_path: Path) -> None:
    """Of each parameter the axes along which ranks hold it alike, as the ranks do, and those of
    data.
    """
    case = STATE[kind]
    module = harness.load_case(case, tmp_path)
    rows = json.loads((tmp_path / "plan.json").read_text())["compared"]
    said = {
        param: "*".join(row["over"])
        for row in rows
        if row["what"] == "state"
        for param in row["of"]
    }
    found = dict[str, str]()
    for of_rank in run_ranks(case.ranks, _axes_of_params, module):
        found |= of_rank
    assert said == found
    (windows,) = (row["over"] for row in rows if row["what"] == "windows")
    batch = {
        axis for axes in module.PLAN.inputs["tokens"].split.get("batch", ()) for axis in [axes]
    }
    assert windows == [
        axis for axis, size in module.PLAN.mesh.items() if size > 1 and axis not in batch
    ]


def _axes_of_params(module: Any) -> dict[str, str]:
    _, state = module.build(Mesh(module.PLAN.mesh))
    found = dict[str, str]()
    for axes, boxes in state.get_boxes_by_axes().items():
        # stages that share are not among axes
        along = "*".join(name for name in axes.split("*") if "[" not in name)
        for box in boxes:
            if along and not box.key.startswith("optimizer/"):
                found[box.key.rpartition(".")[2]] = along
    return found


def _flip(state: Any, name: str) -> None:
    box = next(box for box in state.boxes() if box.name == name)
    box.tensor.view(-1).view(torch.uint8)[-1] ^= 1


def _state_line(check: SameState) -> str:
    try:
        check.require("before the first step")
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [STATE["tensors"], STATE["stages"]], ids=str)
def test_a_run_saves_nothing_that_has_come_to_differ(case: Case, tmp_path: Path) -> None:
    write_program(plan_text(case), tmp_path)
    for rank in range(case.ranks):
        _write_corpus(tmp_path / f"r{rank}")
    fault = Fault(Point("step", 2, case.ranks - 1), Flip(of="state"))
    ended = _run(
        tmp_path, case.ranks, "--data=corpus.bin --data-as-is --steps=6 --save-every=4", fault
    )
    assert {*ended.statuses} == {1}, ended.err
    said = "".join(ended.err)
    assert "error: before the first save ranks do not hold the same state: `" in said
    assert not (tmp_path / "run" / "checkpoints").exists()
