"""A random plan's emitted program, its model in plain torch, and what both are given, in float64.

Purpose: `largest` says whether two ways to compute the same may be compared: torch's norms lose of
a result the more, the larger the mean that they take from it, and what one op loses grows on its
way by the slope of the rest.  Non-goals: which plans, and by how much results may differ.
"""

import re
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.overrides import TorchFunctionMode

from helpers.oracle import harness
from helpers.oracle.plans import Case
from helpers.oracle.reference import Step, Tensors, train
from helpers.programs import load_program
from helpers.random_models import own_ops
from helpers.random_models.torch_model import TorchModel

LR, STEPS = 0.01, 2


@frozen(eq=False)
class Trial:
    """Both are trained from `start` on `batches`, [rows, seq] each."""

    plan: str
    module: ModuleType
    model: TorchModel
    start: Tensors
    batches: Sequence[harness.Inputs]

    @classmethod
    def of(cls, plan: str, folder: Path) -> "Trial":
        """The trial of a plan whose program is written to `folder`.

        In float64; with an eps of adamw at which rounding in small gradients stays rounding.
        """
        plan = re.sub(r"precision = \w+", "precision = fp64", plan).replace(
            "adamw {", "adamw { eps = 1e-3 "
        )
        module = load_program(plan, folder)
        model = TorchModel.of(plan, own_ops)
        start = _drawn(harness.initial(_case(module), module, seed=5))
        return cls(
            plan,
            module,
            model,
            start,
            [_batch(module, model.classes(), seed) for seed in range(STEPS)],
        )

    def emitted(self) -> list[Step]:
        """The steps of the emitted program on its mesh."""
        return harness.run(_case(self.module), self.module, self.start, self.batches, LR)

    def expected(self) -> list[Step]:
        """The results of plain torch in one process."""
        return train(self.model.loss, self.model.training(), self.start, self.batches, LR)

    def largest(self) -> float:
        """The largest element of what the plain model computes in its first step, and of the
        gradients of it.

        Only of finite ones: infinite are those which attention masks, and what large ones have
        grown to.
        """
        batch = self.batches[0]
        parameters = {name: value.clone().requires_grad_() for name, value in self.start.items()}
        with _Kept() as kept:
            mean = self.model.loss(parameters, *batch) / max(1, int((batch[1] >= 0).sum()))
        mean.backward()
        found = [
            t.flatten()
            for result in kept.results
            for t in (result.detach(), result.grad)
            if t is not None
        ]
        every = torch.cat(found).abs()
        return every[every.isfinite()].max().item()


class _Kept(TorchFunctionMode):
    """Keeps every result that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.requires_grad:
            result.retain_grad()
            self.results.append(result)
        return result


def _case(module: ModuleType) -> Case:
    return Case(dp=prod(module.PLAN.mesh.values()))


def _drawn(like: Tensors) -> Tensors:
    """Parameters of a size at which every one of them matters; by their names, in whatever
    order they are kept.
    """
    generator = torch.Generator().manual_seed(7)
    noise = {
        n: torch.randn(like[n].shape, generator=generator, dtype=torch.float64)
        for n in sorted(like)
    }
    return {
        n: v / (4 * v.shape[1]) ** 0.5 if v.dim() > 1 else 0.5 + 0.2 * v for n, v in noise.items()
    }


def _batch(module: ModuleType, classes: int, seed: int) -> harness.Inputs:
    """The program's inputs, at random; some labels do not count, of every rank another number."""
    rows, seq = module.PLAN.global_batch, module.PLAN.seq
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(classes, (rows, seq), generator=generator) for _ in range(2))
    noise = torch.rand(rows, seq, generator=generator) * torch.rand(rows, 1, generator=generator)
    made = {
        "tokens": tokens,
        "labels": labels.masked_fill(noise > 0.3, -100),
        "documents": (torch.rand(rows, seq, generator=generator) < 0.3).long().cumsum(-1),
        "draws": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
    }
    return tuple(made[name] for name in module.PLAN.inputs)
