"""Dropout on forked ranks against plain torch in one process, in float64: the same elements on
every mesh.

The reference drops by a splitmix64 of its own, in numpy, so that what is drawn is held too, not
only that ranks agree.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from helpers.launched import run_file
from helpers.oracle import harness
from helpers.oracle.plans import ROWS, SEQ, Case, context_rules, contexts
from helpers.oracle.reference import Step, Tensors, random_parameters
from helpers.programs import load_program, write_program
from helpers.reference_ops import attention

LR, STEPS, TOLERANCE = 0.1, 2, 1e-10
BLOCKS, LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 2, 2, 4, 2, 4, 16, 24
DRAWS = [[3, -5, 2**62, -(2**63), 7, 1, 0, 9], [11, 4, 2**40, -1, 8, 6, 2, 5]]
"""Of each step, by row."""

MODEL = f"""
model drops(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 32  hidden = {HIDDEN}  heads = {HEADS}  kv_heads = {KV_HEADS}  head_dim = {HEAD_DIM}  ffn = {FFN}
         blocks = {BLOCKS}  layers = {LAYERS} }}
  init ~ normal(0.02)
  x = dropout(embedding(tokens, wte[vocab, hidden]), 0.2)
  repeat blocks {{
    repeat layers {{
      q = x @ wq[hidden -> heads, head_dim]
      k = x @ wk[hidden -> kv_heads, head_dim]
      v = x @ wv[hidden -> kv_heads, head_dim]
      x = x + dropout(attention(q, k, v, causal, dropout=0.3, softcap=3) @ wo[heads, head_dim -> hidden], 0.1)
    }}
    x = x + dropout(tanh(x @ w_in[hidden -> ffn]), 0.25) @ w_out[ffn -> hidden]
  }}
  loss = cross_entropy(dropout(x, 0.5) @ wte, labels)
}}
"""

CASES = [
    Case(microbatches=4),
    Case(dp=4),
    Case(dp=2, tp=2, sp=True, microbatches=2),
    Case(dp=2, tp=2, microbatches=2, gathered="regather"),
    Case(tp=4, sp=True, microbatches=4, gathered="regather"),
    Case(dp=2, tp=2, sp=True, microbatches=2, recompute="full"),
    Case(dp=2, tp=2, microbatches=2, recompute="selective(attention, dropout, tanh)"),
    Case(cp=2, how="as zigzag", microbatches=4),
    Case(uly=2, tp=2, sp=True, microbatches=4),
    Case(cp=2, tp=2, sp=True, how="as zigzag", microbatches=4, recompute="full"),
]


def _plan(case: Case) -> str:
    rules = f"batch over dp  {context_rules(case)}  vocab, heads, kv_heads, ffn over tp"
    return f"""{MODEL}
mesh  {{ dp = {case.dp}  {contexts(case)}  tp = {case.tp} }}
shard {{ {rules}  {"seq over tp" if case.sp else ""} }}
train {{
  seq = {SEQ}  global_batch = {case.rows}  microbatch = {ROWS}  steps = {STEPS}  precision = fp64
  gathered = {case.gathered}  recompute = {case.recompute}
  optimizer sgd {{ lr = {LR} }}  data text {{ files = [python_stdlib] }}
}}
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_mesh_drops_what_one_process_drops(case: Case, tmp_path: Path) -> None:
    """All cases are of eight rows in the same order, and so of one reference."""
    module = load_program(_plan(case), tmp_path)
    start = random_parameters(harness.initial(case, module, seed=5), 1 / 4)
    steps = harness.run(case, module, start, list(_batches(case)), LR)
    for got, want in zip(steps, _expected(start, case), strict=True):
        assert got.loss == pytest.approx(want.loss, rel=TOLERANCE, abs=0)
        assert got.norm == pytest.approx(want.norm, rel=TOLERANCE, abs=0)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            torch.testing.assert_close(got.gradients[name], gradient, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(
                got.parameters[name], want.parameters[name], rtol=0, atol=TOLERANCE
            )


def test_a_run_that_is_taken_up_drops_as_one_that_went_on(tmp_path: Path) -> None:
    """Loss and norm to the last bit; they depend on all that was dropped before."""
    (tmp_path / "data.bin").write_bytes(bytes(i * i % 31 for i in range(4000)))
    whole = _trained(tmp_path / "whole")
    shutil.copytree(
        tmp_path / "whole/run/checkpoints/step-000002",
        tmp_path / "again/run/checkpoints/step-000002",
    )
    assert _trained(tmp_path / "again", "--resume") == whole[2:]
    assert len({line["loss"] for line in whole}) == 4


def _trained(folder: Path, *options: str) -> list[dict[str, float]]:
    """The record of four steps, or of what was left of them."""
    write_program(_plan(Case(microbatches=2)), folder)
    settings = "--device=cpu --steps=4 --save-every=2 --log-every=1 --out=run --data=../data.bin"
    assert run_file(folder, 1, " ".join([settings, *options])) == [(0, "")]
    lines = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    return [
        {key: line[key] for key in ("step", "loss", "norm")} for line in lines if "loss" in line
    ]


@pytest.mark.parametrize("recompute", ["full", "selective(attention, dropout, tanh)"])
def test_what_is_done_again_is_the_same_to_the_last_bit(recompute: str, tmp_path: Path) -> None:
    kept, again = (
        _steps(Case(microbatches=4, recompute=how), tmp_path / how) for how in ("none", recompute)
    )
    for one, other in zip(kept, again, strict=True):
        assert one.loss == other.loss
        assert all(
            torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients
        )


def _steps(case: Case, folder: Path) -> list[Step]:
    module = load_program(_plan(case), folder)
    start = random_parameters(harness.initial(case, module, seed=5), 1 / 4)
    return list(harness.run(case, module, start, list(_batches(case)), LR))


def test_evaluation_drops_nothing(tmp_path: Path) -> None:
    case = Case(dp=2, tp=2, sp=True, microbatches=2)
    module = load_program(_plan(case), tmp_path)
    start, batch = (
        random_parameters(harness.initial(case, module, seed=5), 1 / 4),
        next(_batches(case)),
    )
    tokens, labels, _ = batch
    want = cross_entropy(
        _logits(start, tokens, None).flatten(0, 1), labels.flatten(), ignore_index=-100
    ).item()
    assert (
        harness.evaluate(case, module, start, batch)
        == [pytest.approx(want, rel=TOLERANCE)] * case.ranks
    )


def _batches(case: Case) -> Iterator[tuple[Tensor, ...]]:
    for (tokens, labels), draws in zip(harness.batches(case, STEPS), DRAWS, strict=True):
        yield tokens, labels, torch.tensor(draws)


def _expected(parameters: Tensors, case: Case) -> Iterator[Step]:
    """Each step of plain gradient descent."""
    for tokens, labels, draws in _batches(case):
        leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
        logits = _logits(leaves, tokens, draws.numpy().astype(np.uint64))
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        parameters = {name: value - LR * gradients[name] for name, value in parameters.items()}
        yield Step(
            loss.item(),
            sum(float(g.pow(2).sum()) for g in gradients.values()) ** 0.5,
            gradients,
            parameters,
        )


# ---- the model

Draws = NDArray[np.uint64] | None


def _logits(p: Tensors, tokens: Tensor, draws: Draws) -> Tensor:
    x = _dropped(p["wte"][tokens], draws, 1, 0.2)
    for block in range(BLOCKS):
        of_block = _forked(draws, block)
        for layer in range(LAYERS):
            own = {
                n.split(".")[-1]: v
                for n, v in p.items()
                if n.startswith(f"blocks.{block}.layers.{layer}.")
            }
            x = _attended(own, x, _forked(of_block, layer))
        inner = torch.tanh(x @ p[f"blocks.{block}.w_in"].T)
        x = x + _dropped(inner, of_block, 4, 0.25) @ p[f"blocks.{block}.w_out"].T
    return _dropped(x, draws, 5, 0.5) @ p["wte"].T


def _attended(p: Tensors, x: Tensor, draws: Draws) -> Tensor:
    q, k, v = ((x @ p[name].T).unflatten(-1, (-1, HEAD_DIM)) for name in ("wq", "wk", "wv"))
    y = attention(q, k, v, softcap=3, change_weights=lambda each: _dropped(each, draws, 2, 0.3))
    return x + _dropped(y.flatten(-2) @ p["wo"].T, draws, 3, 0.1)


# ---- what is dropped


def _dropped(x: Tensor, draws: Draws, site: int, p: float) -> Tensor:
    """x, [rows, …], with what falls below `p` dropped; elements count as they lie in a row."""
    if draws is None:
        return x
    index = np.arange(np.prod(x.shape[1:]), dtype=np.uint64).reshape(x.shape[1:])
    key = _words(draws, np.uint64(site)).reshape(-1, *(1,) * index.ndim)
    kept = (_words(key, index) >> np.uint64(11)) / 2**53 >= p
    return x * torch.from_numpy(kept / (1 - p))


def _forked(draws: Draws, layer: int) -> Draws:
    return None if draws is None else _words(draws, np.uint64(2**64 - 1 - layer))


def _words(key: NDArray[np.uint64], counter: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Splitmix64 (Steele, Lea, Flood 2014, figure 16): step `counter` of the stream that begins
    at `key`.
    """
    with np.errstate(over="ignore"):
        z = key + counter * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
