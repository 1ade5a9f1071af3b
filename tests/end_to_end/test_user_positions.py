"""A function that takes its positions trains on any mesh as in one process: ALiBi by hand, against
plain torch.

The last feature of a head's queries is its slope, the last one of keys is their place, so that
attention adds slope · place to each score (Press et al. 2022).  The reference adds it to scores
that it computes itself.
"""

import json
import os
import sys
from math import sqrt
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

import scalec
from helpers.oracle.harness import run
from helpers.oracle.sgd import sgd_steps
from helpers.programs import import_module
from scalec.compiler.emit import emit
from scalec.compiler.emit.readback import check
from scalec.compiler.emit.user_ops import copies
from scalec.compiler.ir import Op, Region
from scalec.compiler.proof import verify
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import PASS_NAMES, compile_plan, lower
from scalec.testing import assert_equal_step, assert_mutants_caught, assert_op
from scalec.testing.faults import Program, fork

pytestmark = pytest.mark.usefixtures("calls_uncompared")

MODULE = """
import torch


def with_slopes(q, count, *, head):
    slopes = torch.exp2(-8 / count * (head + 1).to(q.dtype))
    return torch.cat([q[..., :-1], slopes[:, None].expand(*q.shape[:-1], 1)], -1)


def with_places(k, at):
    places = at.to(k.dtype)[:, None, None]
    return torch.cat([k[..., :-1], places.expand(*k.shape[:-1], 1)], -1)
"""

MODEL = """
op with_slopes(q[.., n, d], count, head=n) -> [.., n, d] over .., n from "alibi_ops:with_slopes" deterministic
op with_places(k[.., s, n, d], at=s) -> [.., s, n, d] over .., s, n from "alibi_ops:with_places" deterministic

model alibi(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  heads = 4  head_dim = 8  layers = 2 }
  init ~ normal(0.5)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    q = with_slopes(x @ wq[hidden -> heads, head_dim], heads)
    k = with_places(x @ wk[hidden -> heads, head_dim])
    v = x @ wv[hidden -> heads, head_dim]
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
"""

TRAIN = """
train {{
  seq = 8  global_batch = 8  microbatch = 2  steps = 3  precision = fp64{more}
  optimizer sgd {{ lr = 0.1  clip = 1.0 }}
  data text {{ files = [python_stdlib] }}
}}
"""

MESHES = {  # the ranks, the sections about them, and further settings of `train`
    "one rank": (1, "mesh { dp = 1 }  shard { batch over dp }", ""),
    "tp": (2, "mesh { tp = 2 }  shard { vocab, heads over tp }", ""),
    "sequence parallel": (2, "mesh { tp = 2 }  shard { vocab, heads over tp  seq over tp }", ""),
    "cp, gathered keys": (2, "mesh { cp = 2 }  shard { seq over cp via gather }", ""),
    "cp, zigzag of gathered keys": (
        2,
        "mesh { cp = 2 }  shard { seq over cp as zigzag via gather }",
        "",
    ),
    "cp, ring": (2, "mesh { cp = 2 }  shard { seq over cp via ring }", ""),
    "cp, zigzag ring": (2, "mesh { cp = 2 }  shard { seq over cp as zigzag via ring }", ""),
    "cp, exchanged heads": (2, "mesh { cp = 2 }  shard { seq over cp via ulysses }", ""),
    "tp and zigzag ring": (
        4,
        "mesh { cp = 2  tp = 2 }  shard { vocab, heads over tp  seq over cp as zigzag via ring }",
        "  recompute = full",
    ),
    "zero 3": (
        4,
        "mesh { dp = 2  tp = 2 }  shard { batch over dp  vocab, heads over tp }  state { zero"
        " 3 over dp }",
        "",
    ),
    "pipeline": (
        4,
        "mesh { pp = 2  cp = 2 }  shard { layers over pp  seq over cp as zigzag via ring }"
        "  pipeline { schedule = 1f1b }",
        "",
    ),
}


def write_plan(folder: Path, mesh: str) -> Path:
    """The plan on a mesh, its module beside it."""
    (folder / "alibi_ops.py").write_text(MODULE)
    _, sections, more = MESHES[mesh]
    plan = folder / "alibi.scale"
    plan.write_text(MODEL + sections + TRAIN.format(more=more))
    return plan


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_are_equal(mesh: str, tmp_path: Path) -> None:
    assert_equal_step(write_plan(tmp_path, mesh))


@pytest.mark.long
def test_mutants_are_caught(tmp_path: Path) -> None:
    assert_mutants_caught(write_plan(tmp_path, "tp and zigzag ring"))


def with_positions(region: Region, words: tuple[str, ...]) -> Region:
    """Every call of `with_slopes` with other positions, or none."""

    def changed(op: Op) -> Op:
        attrs = dict(op.attrs)
        if attrs.get("function") != "alibi_ops:with_slopes":
            return op
        attrs.pop("positions")
        return evolve(op, attrs=tuple((attrs | ({"positions": words} if words else {})).items()))

    body = (with_positions(s, words) if isinstance(s, Region) else changed(s) for s in region.body)
    return evolve(region, body=tuple(body))


@pytest.mark.parametrize("words", [(), ("head head_dim",), ("at heads",)], ids=str)
def test_a_step_with_other_positions_is_another(words: tuple[str, ...], tmp_path: Path) -> None:
    model = compile_plan(load(write_plan(tmp_path, "tp and zigzag ring")), PASS_NAMES[0])
    program = lower(model)
    verify(program, model)
    with pytest.raises(PlanError, match="E0701"):
        verify(evolve(program, region=with_positions(program.region, words)), model)


OTHER_PROGRAMS = [  # what is written instead of what
    ("head=self.heads_positions", "head=self.seq_positions"),
    ("head=self.heads_positions", "at=self.heads_positions"),
    (", head=self.heads_positions", ""),
    ("position_ids(mesh, HEADS, 'tp')", "position_ids(mesh, HEADS)"),
    ("position_ids(mesh, SEQ, 'cp', zigzag=('cp',))", "position_ids(mesh, SEQ, 'cp')"),
    ("position_ids(mesh, SEQ, 'cp', zigzag=('cp',))", "torch.arange(8)"),
]


@pytest.mark.parametrize(
    ("before", "after"), OTHER_PROGRAMS, ids=[after for _, after in OTHER_PROGRAMS]
)
def test_programs_with_other_positions_are_refused(before: str, after: str, tmp_path: Path) -> None:
    source = load(write_plan(tmp_path, "tp and zigzag ring"))
    program = compile_plan(source)
    text = emit(program, source)["train.py"]
    before, after = before.replace("'", '"'), after.replace("'", '"')
    check(text, program)
    assert before in text
    with pytest.raises(AssertionError, match="emit: line"):
        check(text.replace(before, after, 1), program)


def test_the_functions_are_as_the_plan_says(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "tp")
    assert_op(plan, "with_slopes", 8.0)
    assert_op(plan, "with_places")


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax of scores plus slope · place, without the last feature of q and k: [batch, seq,
    heads, head_dim].
    """
    seq, heads, width = q.shape[1:]
    slopes = torch.tensor(
        [2.0 ** (-8 / heads * (head + 1)) for head in range(heads)], dtype=q.dtype
    )
    places = torch.arange(seq, dtype=q.dtype)
    scores = torch.einsum("bind,bjnd->bnij", q[..., :-1], k[..., :-1])
    scores = (scores + slopes[:, None, None] * places) / sqrt(width)
    later = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("bnij,bjnd->bind", weights, v)


def plain_loss(p: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of the model in plain torch."""
    x = p["wte"][tokens]
    for i in range(2):
        layer = {name: p[f"layers.{i}.{name}"] for name in ("wq", "wk", "wv", "wo")}
        q, k, v = (
            F.linear(x, layer[name].flatten(0, -2)).unflatten(-1, (4, 8))
            for name in ("wq", "wk", "wv")
        )
        x = x + F.linear(attention(q, k, v).flatten(-2), layer["wo"])
    return F.cross_entropy(
        F.linear(x, p["head"]).flatten(0, 1), labels.flatten(), ignore_index=-100
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_programs_train_as_plain_torch(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = load(write_plan(tmp_path, mesh)), tmp_path / "out"
    program = compile_plan(source)
    out.mkdir()
    for name, text in (emit(program, source) | copies(program, source)).items():
        (out / name).write_text(text)
    monkeypatch.syspath_prepend(str(out))
    generator = torch.Generator().manual_seed(0)
    layer = {"wq": (32, 16), "wk": (32, 16), "wv": (32, 16), "wo": (16, 32)}
    shapes = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"wte": (32, 16), "head": (32, 16)}
    start = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) / 4 for n, s in shapes.items()
    }
    batches = [
        tuple(torch.randint(32, (8, 8), generator=generator) for _ in range(2)) for _ in range(3)
    ]
    batches[1][1][:3, 2:] = -100  # ranks have other numbers of labels
    case: Any = SimpleNamespace(ranks=MESHES[mesh][0])
    found = run(case, import_module(out / "train.py"), start, batches, 0.1)
    expected = sgd_steps(plain_loss, start, batches, 0.1)
    for step, plain in zip(found, expected, strict=True):
        assert step.loss == pytest.approx(plain.loss, rel=1e-10)
        assert step.norm == pytest.approx(plain.norm, rel=1e-10)
        for name in start:
            assert torch.allclose(
                step.gradients[name], plain.gradients[name], rtol=1e-10, atol=1e-10
            ), name
            assert torch.allclose(
                step.parameters[name], plain.parameters[name], rtol=1e-10, atol=1e-10
            ), name


@pytest.mark.long
def test_a_run_goes_on_on_another_mesh(tmp_path: Path) -> None:
    """Its losses are the ones of a run that was not interrupted."""
    losses = [_losses(tmp_path / name, meshes) for name, meshes in RUNS.items()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


RUNS = {"whole": ["zero 3"], "interrupted": ["tp and zigzag ring", "pipeline"]}
"""The meshes on which a run trains, two steps on each but for the last, which ends at the
fourth.
"""


def _losses(folder: Path, meshes: list[str]) -> list[float]:
    for number, mesh in enumerate(meshes):
        plan_folder = folder / str(number)
        plan_folder.mkdir(parents=True)
        program_folder = plan_folder / "out"
        scalec.plan(write_plan(plan_folder, mesh)).write(program_folder)
        (program_folder / "corpus.bin").write_bytes(bytes(place * 7 % 23 for place in range(8000)))
        steps = 4 if number == len(meshes) - 1 else 2
        options = (
            "--data=corpus.bin --data-as-is --device=cpu --out=../../run --log-every=1"
            f" --steps={steps} --resume=auto"
        )
        with fork(Program(program_folder, MESHES[mesh][0], options), main=_run_program) as job:
            ended = job.wait(120)
        assert ended.succeeded, ended.err
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    return [step["loss"] for step in map(json.loads, lines) if "loss" in step]


def _run_program() -> None:
    """Runs train.py as Python does: modules beside it can be imported."""
    sys.path.insert(0, os.getcwd())
    run_path(sys.argv[0], run_name="__main__")
