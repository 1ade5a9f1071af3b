"""Emitted fp16 programs on gloo ranks against a loop in plain torch with a loss scale of its own.

The loop knows nothing of scalec: f16 copies of f32 masters, gradients in f32, GradScaler's rule
written out.  Non-goals: the rule by itself (`tests/runtime/state/test_skips_loss_scale.py`), models
of any size (`test_numbers`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.programs import load_program
from scalec.runtime import Mesh

PLAN = """
model small(tokens[batch, seq], labels[batch, seq]) {{
  dims  {{ vocab = 16  hidden = 8  ffn = 12 }}
  init ~ normal(0.3)
  x = embedding(tokens, wte[vocab, hidden])
  x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
mesh  {{ dp = 2 }}
shard {{ batch over dp }}
state {{ {state} }}
train {{
  seq = 8  global_batch = 8  microbatch = 2  steps = 10  precision = fp16
  optimizer adamw {{ lr = 0.02  betas = [0.9, 0.95]  clip = 0.5 }}
  data text {{ files = [python_stdlib] }}
}}
"""
SHAPES = {"wte": (16, 8), "w_in": (12, 8), "w_out": (8, 12), "head": (16, 8)}
STATES = ["", "zero 1 over dp"]
LR, BETAS, EPS, CLIP = 0.02, (0.9, 0.95), 1e-8, 0.5
SCALE, STEPS = "optimizer/loss_scale", "optimizer/loss_scale_steps"

Tensors = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def batches(count: int) -> list[Batch]:
    """Each token is followed by the next of the vocabulary: there is something to learn."""
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(16, (8, 8), generator=generator) for _ in range(count)]
    return [(each, (each + 1) % 16) for each in tokens]


def initial() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


# ---- plain torch


@dataclass
class Loop:
    """Masters, moments and the loss scale of one process."""

    masters: Tensors
    scale: float
    good: int
    count: int = 0
    first: Tensors = field(default_factory=dict)
    second: Tensors = field(default_factory=dict)

    def step(self, batch: Batch) -> tuple[float, float]:
        """The loss and the norm of a step on two ranks' rows, two of each in each microbatch."""
        tokens, labels = batch
        gradients = {name: torch.zeros_like(value) for name, value in self.masters.items()}
        total = 0.0
        for rank in range(2):
            for microbatch in range(2):
                rows = slice(4 * microbatch + 2 * rank, 4 * microbatch + 2 * rank + 2)
                leaves = {
                    name: value.half().requires_grad_() for name, value in self.masters.items()
                }
                part = _loss(leaves, tokens[rows], labels[rows])
                (part / labels.numel() * self.scale).backward()
                total += part.item()
                for name, leaf in leaves.items():
                    assert leaf.grad is not None
                    gradients[name] += leaf.grad.float()
        norm = float(torch.stack([(g / self.scale).norm() for g in gradients.values()]).norm())
        self._applied(
            {name: g / self.scale * min(1.0, CLIP / norm) for name, g in gradients.items()}, norm
        )
        return total / labels.numel(), norm

    def _applied(self, gradients: Tensors, norm: float) -> None:
        if not torch.isfinite(torch.tensor(norm)):
            self.scale, self.good = self.scale / 2, 0
            return
        self.count += 1
        for name, g in gradients.items():
            b1, b2 = BETAS
            self.first[name] = b1 * self.first.get(name, torch.zeros_like(g)) + (1 - b1) * g
            self.second[name] = b2 * self.second.get(name, torch.zeros_like(g)) + (1 - b2) * g * g
            mean, square = (
                self.first[name] / (1 - b1**self.count),
                self.second[name] / (1 - b2**self.count),
            )
            self.masters[name] = self.masters[name] - LR * mean / (square.sqrt() + EPS)
        self.good += 1
        if self.good == 2000:
            self.scale, self.good = self.scale * 2, 0


def _loss(p: Tensors, tokens: Tensor, labels: Tensor) -> Tensor:
    x = p["wte"][tokens]
    x = x + F.silu(x @ p["w_in"].T) @ p["w_out"].T
    return F.cross_entropy(
        (x @ p["head"].T).float().flatten(0, 1), labels.flatten(), reduction="sum"
    )


# ---- the emitted program


@dataclass(frozen=True)
class Seen:
    """After a step: its loss and norm, and all that the rank keeps."""

    loss: float
    norm: float
    kept: Tensors


def trained(
    folder: Path,
    state: str,
    steps: list[Batch],
    scale: float,
    good: int = 0,
    spoiled: int | None = None,
) -> list[list[Seen]]:
    """What each rank saw at each step, beginning with a loss scale after so many good steps.

    The step `spoiled` has a scale at which gradients overflow.
    """
    module = load_program(PLAN.format(state=state), folder)
    return run_ranks(2, _train, module, steps, scale, good, spoiled)


def _train(
    module: ModuleType, steps: list[Batch], scale: float, good: int, spoiled: int | None
) -> list[Seen]:
    model, state = module.build(Mesh(module.PLAN.mesh))
    harness.fill(state, initial())
    harness.kept(state)[SCALE].fill_(scale)
    harness.kept(state)[STEPS].fill_(good)
    seen: list[Seen] = []
    for number, batch in enumerate(steps):
        if number == spoiled:
            harness.kept(state)[SCALE].fill_(2.0**24)
        seen.append(_step(module, model, state, batch))
    return seen


def _step(module: ModuleType, model: Any, state: Any, batch: Batch) -> Seen:
    metrics = module.train_step(model, state, harness.local_batch(module.PLAN, *batch), LR)
    kept = {key: value.clone() for key, value in harness.kept(state).items()}
    return Seen(float(metrics.loss), float(metrics.norm), kept)


@pytest.mark.sample(3)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("scale", "good"), [(2.0**10, 0), (2.0**10, 1997), (2.0**24, 0)])
def test_each_step_is_that_of_plain_torch(
    state: str, scale: float, good: int, tmp_path: Path
) -> None:
    """With a scale that stays, one that grows and one that falls."""
    steps = batches(12)
    loop, ranks = Loop(initial(), scale, good), trained(tmp_path, state, steps, scale, good)
    scales: set[float] = set()
    for batch, *seen in zip(steps, *ranks, strict=True):
        loss, norm = loop.step(batch)
        scales.add(loop.scale)
        for each in seen:
            assert each.loss == pytest.approx(loss, rel=1e-4)
            assert each.norm == pytest.approx(norm, rel=1e-4, nan_ok=True)
            assert (float(each.kept[SCALE]), float(each.kept[STEPS])) == (loop.scale, loop.good)
            assert float(each.kept["optimizer/step"]) == loop.count
        for name, value in loop.masters.items():
            torch.testing.assert_close(whole(name, seen, state), value, atol=5e-4, rtol=5e-4)
    expected = {(1024, 0): {1024.0}, (1024, 1997): {1024.0, 2048.0}}.get((int(scale), good))
    assert scales == expected if expected else min(scales) < scale


def whole(key: str, seen: list[Seen], state: str) -> Tensor:
    """A tensor put together of the rows that the ranks keep, or of the copies, which must agree."""
    parts = [each.kept[key] for each in seen if key in each.kept]
    if state:
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


@pytest.mark.parametrize("state", STATES)
def test_an_overflow_skips_the_step_on_all_ranks(state: str, tmp_path: Path) -> None:
    """To the last bit: after a step that is good, with masters, moments and a count."""
    good, rest = batches(2)
    ranks = trained(tmp_path, state, [good, rest, rest], 2.0**10, spoiled=1)
    for before, after, _ in ranks:
        assert not torch.isfinite(torch.tensor(after.norm))
        assert (float(before.kept[SCALE]), float(after.kept[SCALE])) == (2.0**10, 2.0**23)
        assert float(after.kept["optimizer/step"]) == 1
        same = before.kept.keys() - {SCALE, STEPS}
        assert any(key.startswith("optimizer/exp_avg") for key in same)
        assert all(torch.equal(before.kept[key], after.kept[key]) for key in same)
    assert len({(each[1].loss, float(each[2].kept[SCALE])) for each in ranks}) == 1


@pytest.mark.parametrize("state", STATES)
def test_it_learns(state: str, tmp_path: Path) -> None:
    (first, _) = trained(tmp_path, state, batches(40), 2.0**16)
    assert first[-1].loss < first[0].loss / 2
    assert all(seen.kept[name].dtype == torch.float32 for seen in first for name in seen.kept)
