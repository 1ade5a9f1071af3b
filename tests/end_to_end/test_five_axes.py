"""Plans of five axes on sixteen gloo ranks: against one process, recorded, sanitized, saved,
resumed and killed.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from end_to_end.test_numbers import assert_steps_equal
from helpers.forked_ranks import run_ranks
from helpers.launched import run_file
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case
from helpers.oracle.recording import recorded
from helpers.oracle.reference import Config, Route, Training
from helpers.programs import import_module, write_program
from scalec.compiler.syntax.limits import load
from scalec.runtime import Mesh, TrainState
from scalec.runtime.checkpoint import saver
from scalec.runtime.checkpoint.reader import Saved

pytestmark = pytest.mark.long

PLANS = Path(__file__).parents[2] / "plans"
TEXTS = {name: load(PLANS / f"{name}.scale").text for name in ("tiny_five", "tiny_hybrid")}
CONFIG = Config(
    vocab=256,
    classes=256,
    hidden=64,
    ffn=96,
    layers=4,
    eps=1e-6,
    route=Route(experts=8, normalise=False, balance=1e-3, ffn=48, shared=True),
)
"""The model of plans/models/tiny_moe.scale."""
TRAINING = Training("adamw", eps=1e-8, weight_decay=0.1, clip=1.0)
RANKS = Case(dp=16)
LR, STEPS = 3e-3, 2

OTHERS = {
    "one rank": ("mesh { dp = 1 }", "shard { batch over dp }", ""),
    "four": (
        "mesh { dp = 2  ep = 2 }",
        "shard { experts over ep  batch over dp, ep }",
        "state { zero 2 over dp, ep }",
    ),
    "eight": (
        "mesh { dp = 2  cp = 2  tp = 2 }",
        """shard {
          experts over tp  batch over dp  seq over cp as zigzag
          vocab, heads, kv_heads, ffn over tp  seq over tp
        }""",
        "state { zero 3 over dp, cp }",
    ),
}
"""Meshes of other sizes, on which experts lie otherwise."""
SAVED, LAST = 2, 4


def _written(plan: str, folder: Path, **settings: str) -> Path:
    """The emitted files of a plan in float64, and with these settings of `train` in place of
    its own.
    """
    for name, value in {**settings, "precision": "fp64"}.items():
        plan, count = re.subn(rf"\b{name} = \S+", f"{name} = {value}", plan)
        assert count == 1
    return write_program(plan, folder, str(PLANS / "tiny.scale"))


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens and labels, [rows, seq] a step; of each sequence another number of labels
    counts.
    """
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens, labels = (
            torch.randint(CONFIG.vocab, (32, 128), generator=generator) for _ in range(2)
        )
        noise = torch.rand(32, 128, generator=generator) * torch.rand(32, 1, generator=generator)
        yield tokens, labels.masked_fill(noise > 0.2, -100)


@pytest.mark.parametrize("name", TEXTS)
def test_two_steps_equal_one_process(name: str, tmp_path: Path) -> None:
    """Loss, routers' loss, every gradient, their norm and every parameter, to 1e-10."""
    module = import_module(_written(TEXTS[name], tmp_path) / "train.py")
    start, given = reference.initial(CONFIG), [*_batches()]
    expected = reference.run(CONFIG, TRAINING, start, given, LR)
    assert_steps_equal(harness.run(RANKS, module, start, given, LR), expected)


@pytest.mark.parametrize("name", TEXTS)
def test_the_record_is_the_plan(name: str, tmp_path: Path) -> None:
    """Of all sixteen ranks, call for call."""
    module = import_module(_written(TEXTS[name], tmp_path, seq="64") / "train.py")
    found = recorded(module, tmp_path, "--steps 2")
    assert found.equal, found.lines()


class _Run:
    """A finished run: its log, and its folder with checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs/tiny"
        lines = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        keys = ("step", "loss", "router_loss", "norm", "tokens")
        self.log = [{key: line[key] for key in keys} for line in lines if "loss" in line]

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:06d}"

    def state(self, step: int) -> dict[str, Tensor]:
        """The tensors of a checkpoint, whole."""
        saved = Saved(self.checkpoint(step))
        return saved.whole([*saved.tensors()])


def _trained(plan: str, folder: Path, ranks: int = 16, resume: _Run | None = None) -> _Run:
    """Trains to the last step, from the middle of another run if there is one."""
    ended = _started(plan, folder, ranks, resume)
    assert [status for status, _ in ended] == [0] * ranks, ended
    return _Run(folder)


def _started(
    plan: str, folder: Path, ranks: int = 16, resume: _Run | None = None
) -> list[tuple[int, str]]:
    """Exit status and standard error of each rank.

    AdamW's eps is so large that updates do not show in which order gradients near 0 were summed.
    """
    _written(plan, folder, eps="1e-5")
    (folder / "corpus.bin").write_bytes(bytes(i * i * 7 % 251 for i in range(40_000)))
    if resume:
        shutil.copytree(
            resume.checkpoint(SAVED),
            folder / "runs/tiny/checkpoints" / resume.checkpoint(SAVED).name,
        )
    options = (
        f"--device=cpu --steps={LAST} --save-every={SAVED} --log-every=1 --data=corpus.bin"
        " --data-as-is"
    )
    return run_file(folder, ranks, f"{options} --resume" if resume else options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Run]:
    """An uninterrupted run of each plan."""
    return {name: _trained(text, tmp_path_factory.mktemp(name)) for name, text in TEXTS.items()}


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_is_found_where_all_is_well(
    name: str, whole: dict[str, _Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the sanitizer, which compares what ranks should hold alike, the run is the same to
    the last bit.
    """
    monkeypatch.setenv("SCALEC_SANITIZE", "1")
    watched = _trained(TEXTS[name], tmp_path)
    assert watched.log == whole[name].log
    _assert_same(watched.state(LAST), whole[name].state(LAST))


def _assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """To the last bit."""
    assert got.keys() == want.keys()
    assert [key for key, value in want.items() if not torch.equal(got[key], value)] == []


@pytest.mark.parametrize("name", TEXTS)
def test_a_run_resumes_bitwise(name: str, whole: dict[str, _Run], tmp_path: Path) -> None:
    resumed = _trained(TEXTS[name], tmp_path, resume=whole[name])
    assert resumed.log == whole[name].log[SAVED:]
    _assert_same(resumed.state(LAST), whole[name].state(LAST))


@pytest.mark.parametrize("other", [*OTHERS, "folded otherwise"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_run_resumes_on_other_meshes(
    name: str, other: str, whole: dict[str, _Run], tmp_path: Path
) -> None:
    """What is loaded is what was saved, to the last bit; the steps after it differ by the order
    of sums alone.
    """
    text = next(text for of, text in TEXTS.items() if of != name)
    if other in OTHERS:
        start, end = text.index("mesh {"), text.index("train {")
        text = text[:start] + "\n".join(OTHERS[other]) + "\n" + text[end:]
    module = import_module(_written(text, tmp_path, eps="1e-5") / "train.py")
    ranks = prod(module.PLAN.mesh.values())
    parts = run_ranks(ranks, _loaded, module, whole[name].checkpoint(SAVED))
    _assert_same(harness.joined(parts), whole[name].state(SAVED))

    resumed = _trained(text, tmp_path, ranks, whole[name])
    for got, want in zip(resumed.log, whole[name].log[SAVED:], strict=True):
        assert got == pytest.approx(want, rel=1e-12)
    state, expected = resumed.state(LAST), whole[name].state(LAST)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            state[key], value, rtol=1e-9, atol=1e-12, msg=partial("{}: {}".format, key)
        )


def _loaded(module: ModuleType, checkpoint: Path) -> dict[str, harness.Part]:
    """What a rank holds of a checkpoint that it has loaded."""
    _, state = module.build(Mesh(module.PLAN.mesh))
    saver.load(checkpoint, state)
    return {
        box.key: harness.Part(box.tensor.clone(), box.shape, box.offset) for box in state.boxes()
    }


def test_a_killed_rank_loses_nothing(
    whole: dict[str, _Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step after a checkpoint; all others end by themselves, and the run goes on from
    the checkpoint.
    """
    text, update, updates = TEXTS["tiny_five"], TrainState.update, list[None]()

    def kill(*args: Any, **options: Any) -> None:
        updates.append(None)
        if len(updates) > SAVED and dist.get_rank() == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        update(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "update", kill)
        ended = _started(text, tmp_path / "killed")
    statuses = {rank: status for rank, (status, _) in enumerate(ended)}
    assert statuses.pop(6) == -signal.SIGKILL
    assert {*statuses.values()} == {1}, ended
    left = tmp_path / "killed/runs/tiny/checkpoints"
    assert [path.name for path in left.iterdir()] == [f"step-{SAVED:06d}"]
    again = _trained(text, tmp_path / "again", resume=_Run(tmp_path / "killed"))
    assert again.log == whole["tiny_five"].log[SAVED:]
    _assert_same(again.state(LAST), whole["tiny_five"].state(LAST))
