"""A function that looks back along the sequence trains on any mesh as in one process: a scan,
against plain torch.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.oracle.harness import run
from helpers.oracle.sgd import sgd_steps
from helpers.programs import import_module
from scalec.compiler.emit import emit
from scalec.compiler.emit.user_ops import copies
from scalec.compiler.syntax.limits import load
from scalec.compiler.tuning.lowering import compile_plan

pytestmark = pytest.mark.usefixtures("calls_uncompared")

MODULE = """
def scanned(x):
    return x.cumsum(-2) / 4
"""

MODEL = """
op scanned(linear x[.., s, f]) -> [.., s, f] over .., f causal s from "scans:scanned" deterministic

model scans(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  ffn = 24  layers = 2 }
  init ~ normal(0.5)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(scanned(x @ w_in[hidden -> ffn])) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
"""

TRAIN = """
train {
  seq = 8  global_batch = 8  microbatch = 2  steps = 3  precision = fp64
  optimizer sgd { lr = 0.1  clip = 1.0 }
  data text { files = [python_stdlib] }
}
"""

MESHES = {  # the ranks, and the sections about them
    "data and tensors": (4, "mesh { dp = 2  tp = 2 }  shard { batch over dp  vocab, ffn over tp }"),
    "sequence parallel": (2, "mesh { tp = 2 }  shard { vocab, ffn over tp  seq over tp }"),
    "zero 3": (2, "mesh { dp = 2 }  shard { batch over dp }  state { zero 3 over dp }"),
    "pipeline": (2, "mesh { pp = 2 }  shard { layers over pp }  pipeline { schedule = 1f1b }"),
}


def plain_loss(p: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    """The loss of the model in plain torch; the scan is a product with a triangle of ones."""
    x = p["wte"][tokens]
    looks_back = torch.ones(8, 8, dtype=torch.float64).tril() / 4
    for i in range(2):
        inner = F.linear(x, p[f"layers.{i}.w_in"])
        x = x + F.linear(F.silu(looks_back @ inner), p[f"layers.{i}.w_out"])
    return F.cross_entropy(
        F.linear(x, p["head"]).flatten(0, 1), labels.flatten(), ignore_index=-100
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_programs_train_as_plain_torch(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, sections = MESHES[mesh]
    (tmp_path / "scans.py").write_text(MODULE)
    plan, out = tmp_path / "plan.scale", tmp_path / "out"
    plan.write_text(MODEL + sections + TRAIN)
    source = load(plan)
    program = compile_plan(source)
    out.mkdir()
    for name, text in (emit(program, source) | copies(program, source)).items():
        (out / name).write_text(text)
    monkeypatch.syspath_prepend(str(out))
    generator = torch.Generator().manual_seed(0)
    layer = {"w_in": (24, 16), "w_out": (16, 24)}
    shapes = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {"wte": (32, 16), "head": (32, 16)}
    start = {
        n: torch.randn(s, generator=generator, dtype=torch.float64) / 4 for n, s in shapes.items()
    }
    batches = [
        tuple(torch.randint(32, (8, 8), generator=generator) for _ in range(2)) for _ in range(3)
    ]
    case: Any = SimpleNamespace(ranks=ranks)
    steps = run(case, import_module(out / "train.py"), start, batches, 0.1)
    for step, plain in zip(steps, sgd_steps(plain_loss, start, batches, 0.1), strict=True):
        assert step.loss == pytest.approx(plain.loss, rel=1e-10)
        assert step.norm == pytest.approx(plain.norm, rel=1e-10)
        for name in start:
            assert torch.allclose(
                step.gradients[name], plain.gradients[name], rtol=1e-10, atol=1e-10
            ), name
            assert torch.allclose(
                step.parameters[name], plain.parameters[name], rtol=1e-10, atol=1e-10
            ), name
