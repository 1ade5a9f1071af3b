"""Weights of plans without `names hf`: what a run on a mesh exports, a single process begins with.

Its first loss is the run's next one, in float64, so that every parameter was written and read where
it belongs.
"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.programs import load_program
from scalec.runtime import Mesh
from scalec.runtime.checkpoint import export, saver
from scalec.runtime.checkpoint.hf_weights import Reader

ROWS, SEQ, VOCAB, LR = 8, 16, 62, 0.5

LAYER = """
    a = rmsnorm(x, {n}1[hidden], eps)
    k = a @ {n}k[hidden -> heads, head_dim] + {n}b[heads, head_dim]
    o = attention(a @ {n}q[hidden -> heads, head_dim], k, a @ {n}v[hidden -> heads, head_dim], mask=causal)
    x = x + o @ {n}o[heads, head_dim -> hidden]
"""
EXPERTS = """
    y = rmsnorm(x, n2[hidden], eps)
    route y to experts by top(y @ router[hidden -> experts], 2) {
      y = silu(y @ e_up[hidden -> ffn]) @ e_down[ffn -> hidden]
    }
    x = x + y
"""
BODIES = {
    "tied": f"repeat layers {{ {LAYER.format(n='w')} }}",
    "nested": (
        f"repeat blocks {{ repeat layers {{ {LAYER.format(n='w')} }} {LAYER.format(n='z')} }}"
    ),
    "branches": f"repeat layers as i {{ if i < 1 {{ {LAYER.format(n='w')} }} else {{"
    f" {LAYER.format(n='z')} }} }}",
    "tables": f"repeat layers {{ {LAYER.format(n='w')} x = x + embedding(tokens, table[vocab,"
    f" hidden]) }}",
    "experts": f"repeat layers {{ {LAYER.format(n='w')} {EXPERTS} }}",
}
MESHES = {
    "tp": ("dp = 2  tp = 2", "batch over dp  vocab, heads over tp  seq over tp", ""),
    "zero_3": ("dp = 2", "batch over dp", "state { zero 3 over dp }"),
    "pp": ("pp = 2", "layers over pp", "pipeline { schedule = 1f1b }"),
    "ep": (
        "dp = 2  tp = 2",
        "experts over dp  batch over dp  heads over tp  seq over tp",
        "state { zero 1 over dp }",
    ),
}
CASES = (
    ("tied", "tp"),
    ("tied", "pp"),
    ("nested", "zero_3"),
    ("branches", "tp"),
    ("branches", "pp"),
    ("tables", "tp"),
    ("tables", "zero_3"),
    ("experts", "ep"),
)


def plan(body: str, mesh: str = "", rules: str = "", sections: str = "") -> str:
    """A plan without names, whose head is its embedding and whose vocabulary is padded."""
    return f"""
    model small(tokens[batch, seq], labels[batch, seq]) {{
      dims {{ vocab = {VOCAB} pad 4  hidden = 32  heads = 4  head_dim = 8  ffn = 24  experts = 4
             layers = 2  blocks = 2 }}
      const {{ eps = 1e-5 }}
      init ~ normal(0.3)
      x = embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden]
      {BODIES[body]}
      loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ wte + bias[seq, vocab], labels)
    }}
    mesh {{ {mesh} }}
    shard {{ {rules} }}
    {sections}
    train {{
      seq = {SEQ}  global_batch = {ROWS}  microbatch = 2  steps = 2  precision = fp64
      optimizer sgd {{ lr = 0.1 }}
      data text {{ files = ["unused"] }}
    }}
    """


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCAB, (ROWS, SEQ), generator=generator) for _ in range(2))
    return tokens, labels


@pytest.mark.sample(3)
@pytest.mark.parametrize(("body", "mesh"), CASES, ids=lambda each: each)
def test_what_a_mesh_exports_one_process_begins_with(body: str, mesh: str, tmp_path: Path) -> None:
    axes, rules, sections = MESHES[mesh]
    on_mesh = load_program(plan(body, axes, rules, sections), tmp_path / "mesh")
    alone = load_program(plan(body), tmp_path / "alone")
    ranks = 4 if "tp" in axes else 2
    _, next_loss = run_ranks(ranks, _two_steps, on_mesh, tmp_path)[0]
    export.export(tmp_path / "step-000001", tmp_path / "out", on_mesh.PLAN.names)
    (loss,) = run_ranks(1, _first_step, alone, tmp_path)
    assert loss == pytest.approx(next_loss, rel=1e-10)
    export.export(tmp_path / "step-000002", tmp_path / "again", alone.PLAN.names)
    written, again = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "again")
    )
    assert written.keys() == again.keys()
    assert all(torch.equal(value, again[name]) for name, value in written.items())
    tables = [tensor for tensor in written if tensor == "wte" or tensor.endswith(".table")]
    assert len(tables) == (3 if body == "tables" else 1)
    assert all(written[tensor].shape == (VOCAB, 32) for tensor in tables)
    assert on_mesh.PLAN.names.have_parameter_names


def _two_steps(module: ModuleType, folder: Path) -> tuple[float, float]:
    """The losses of two steps; what the first leaves is saved."""
    model, state = module.build(Mesh(module.PLAN.mesh))
    losses = list[float]()
    for step in (1, 2):
        rows = harness.local_batch(module.PLAN, *batch())
        metrics = module.train_step(model, state, rows, LR)
        losses.append(metrics.loss.item())
        if step == 1:
            saver.save(folder, 1, state)
    return losses[0], losses[1]


def _first_step(module: ModuleType, folder: Path) -> float:
    """The loss with the exported weights, which are saved as they were read."""
    model, state = module.build(Mesh(module.PLAN.mesh))
    Reader(folder / "out", module.PLAN.names).fill(state)
    saver.save(folder, 2, state)
    return module.train_step(
        model, state, harness.local_batch(module.PLAN, *batch()), LR
    ).loss.item()
