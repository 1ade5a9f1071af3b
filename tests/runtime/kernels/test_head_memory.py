"""The bytes and products of an 8B-shaped model's head, in bfloat16, counted on a device without
memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scalec.runtime import token_loss
from scalec.runtime.kernels import (
    CrossEntropy,
    LinearCrossEntropy,
    LinearSoftmaxStats,
    Tile,
    launching,
)
from scalec.runtime.ops.delayed_wgrad import Part, set_apart

TOKENS, HIDDEN, CLASSES = 8192, 4096, 128256
LOGITS, OF_X, OF_WEIGHT = 2 * TOKENS * CLASSES, 2 * TOKENS * HIDDEN, 2 * CLASSES * HIDDEN
"""Bytes."""

TILES = {CLASSES: Tile(rows=1, warps=8, columns=4096)}

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


class Counted(TorchDispatchMode):
    """The bytes that are allocated within it, and the most at once; how often each weight was
    multiplied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self.flop = 0, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        before = {it.untyped_storage()._cdata for it in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before:
                self._storages.setdefault(
                    storage._cdata, (StorageWeakRef(storage), storage.nbytes())
                )
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            a, b = _tensors(args)[-2:]
            self.flop += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.most = max(self.most, self.now)
        return result

    @property
    def now(self) -> int:
        """The bytes that are still there."""
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def _tensors(tree: Any) -> list[Tensor]:
    return [it for it in tree_leaves(tree) if isinstance(it, Tensor)]


@dataclass(frozen=True)
class Cost:
    """Bytes between forward and backward, and the most at once; products as large as that of x
    and the weight.
    """

    kept: int
    most: int
    products: float


def _cost(head: Head, later: bool = False) -> Cost:
    """Of forward and backward, beside x, the weight and the gradients of both."""
    x = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(CLASSES, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    labels = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    parts: list[Part] = []
    with patch.object(launching, "launch", _no_kernel), Counted() as counted:
        loss = head(x, weight, labels)
        kept = counted.now
        if later:
            with set_apart(parts):
                loss.backward()
            for part in parts:
                part()
        else:
            loss.backward()
    assert bool(parts) == later
    return Cost(
        kept, counted.most - OF_X - OF_WEIGHT, counted.flop / (2 * TOKENS * HIDDEN * CLASSES)
    )


def _no_kernel(*args: Any, **options: Any) -> None:
    """Kernels allocate nothing."""


def _unfused(
    loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, labels: Tensor
) -> Tensor:
    return loss(F.linear(x, weight), labels)


def _by_classes(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    m, z, t = LinearSoftmaxStats(TILES, 8064)(x, weight, labels, bias=bias)
    return token_loss(z, t - m, labels)


def _by_tokens(x: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    return LinearCrossEntropy(TILES, 1024)(x, weight, labels, bias=bias)


def _biased(head: Callable[..., Tensor]) -> Head:
    """A head with a bias to be learned."""
    bias = torch.empty(CLASSES, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return lambda x, weight, labels: head(x, weight, labels, bias)


UNFUSED = partial(_unfused, CrossEntropy(TILES))
PER_TOKEN = 64 * TOKENS


def test_unfused_has_all_logits_and_their_gradient() -> None:
    cost = _cost(UNFUSED)
    assert cost.products == 3
    assert LOGITS <= cost.kept <= LOGITS + PER_TOKEN
    assert 2 * LOGITS - OF_X - OF_WEIGHT <= cost.most <= 2 * LOGITS


def test_by_classes_nothing_is_kept_and_logits_are_made_twice() -> None:
    cost = _cost(_by_classes)
    assert cost.products == 4
    assert cost.kept <= PER_TOKEN
    assert cost.most < 0.1 * _cost(UNFUSED).most


def test_by_tokens_gradients_are_kept_and_logits_are_made_once() -> None:
    cost = _cost(_by_tokens)
    assert cost.products == 3
    assert OF_X + OF_WEIGHT <= cost.kept <= OF_X + OF_WEIGHT + PER_TOKEN
    assert cost.most < 0.1 * _cost(UNFUSED).most


@pytest.mark.parametrize(("head", "products"), [(_by_classes, 5), (_by_tokens, 3)])
def test_a_gradient_that_is_put_off_may_need_logits_again(head: Head, products: int) -> None:
    assert _cost(head, later=True).products == products
    # those of weight and bias need the same
    assert _cost(_biased(head), later=True).products == products


@pytest.mark.parametrize("head", [_by_classes, _by_tokens])
def test_a_bias_costs_nothing_of_the_size_of_the_logits(head: Head) -> None:
    one, other = _cost(head), _cost(_biased(head))
    assert one.products == other.products
    assert other.kept - one.kept <= 2 * CLASSES
    assert other.most - one.most <= 8 * CLASSES
