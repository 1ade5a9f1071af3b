"""Hashes, comparisons over an axis and the lines of programs: each by itself, with every
difference planted.
"""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.forked_ranks import run_ranks
from scalec.runtime import (
    Axis,
    Mesh,
    all_gather,
    all_reduce,
    all_reduce_,
    reduce_scatter,
    regather,
    replicate,
    shard,
)
from scalec.runtime.comm import collectives
from scalec.runtime.debug.compare import BLOCK, Comparison, Difference
from scalec.runtime.debug.sanitize import Sanitizer
from scalec.runtime.errors import RunError

pytestmark = pytest.mark.usefixtures("calls_uncompared")

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


Hash = Callable[[Tensor], Tensor]


@pytest.fixture(scope="module")
def fingerprint() -> Hash:
    comparison = Comparison(CPU)
    return lambda x: comparison.hashes([x])[0]


def _random(size: int, dtype: torch.dtype) -> Tensor:
    bits = torch.randint(
        0, 2 if dtype is torch.bool else 256, (size * dtype.itemsize,), dtype=torch.uint8
    )
    return bits.view(dtype)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_single_bit_and_any_swap_change_the_hash(fingerprint: Hash, dtype: torch.dtype) -> None:
    x = _random(67, dtype)
    seen = {tuple(fingerprint(x).tolist())}
    for byte in range(x.nbytes):
        for bit in range(1 if dtype is torch.bool else 8):
            other = x.clone()
            other.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(tuple(fingerprint(other).tolist()))
    changes = x.nbytes * (1 if dtype is torch.bool else 8)
    assert len(seen) == 1 + changes
    order = torch.arange(67)
    order[[3, 50]] = order[[50, 3]]
    x[3], x[50] = 0, 1
    assert not torch.equal(fingerprint(x), fingerprint(x[order]))


def test_bits_count_not_values(fingerprint: Hash) -> None:
    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    payload = nan.clone()
    payload.view(torch.int32)[1] ^= 1
    for x, y in ((zero, -zero), (nan, payload), (zero, zero.double()), (zero, zero.view(3, 1))):
        assert not torch.equal(fingerprint(x), fingerprint(y))
    assert torch.equal(fingerprint(nan), fingerprint(nan.clone()))


def test_several_sign_bits_do_not_cancel(fingerprint: Hash) -> None:
    """The top bits of words are where sums modulo a power of two are weakest."""
    x = torch.ones(64)
    hashes = set()
    for i in range(64):
        for j in range(i):
            other = x.clone()
            other[[i, j]] *= -1
            hashes.add(tuple(fingerprint(other).tolist()))
    assert len(hashes) == 64 * 63 // 2


def test_layout_in_memory_and_blocks_do_not_matter_but_position_does(fingerprint: Hash) -> None:
    x = torch.randn(BLOCK // 128, 300)  # two blocks and a part
    assert torch.equal(fingerprint(x), fingerprint(x.t().contiguous().t()))
    swapped = x.clone().view(-1)
    swapped[:BLOCK], swapped[BLOCK : 2 * BLOCK] = x.view(-1)[BLOCK : 2 * BLOCK], x.view(-1)[:BLOCK]
    assert not torch.equal(fingerprint(x), fingerprint(swapped.view_as(x)))
    assert fingerprint(torch.zeros(0)).shape == (3,)


def _compared(make: Callable[[int], list[Tensor]]) -> Difference | None:
    axis = Mesh({"tp": dist.get_world_size()}).axis("tp")
    return Comparison(CPU).first(make(dist.get_rank()), axis)


def _change(
    rank: int, index: int, value: float, size: int, dtype: torch.dtype = torch.float32
) -> Any:
    def make(own: int) -> list[Tensor]:
        x = torch.arange(size).to(dtype)
        if own == rank:
            x[index] = value
        return [torch.ones(3), x, torch.full((2,), float(own))]

    return make


def test_the_first_element_that_differs_and_the_odd_rank_are_named() -> None:
    found = run_ranks(3, _compared, _change(1, 2 * BLOCK + 7, -1, 2 * BLOCK + 9))
    at = 2 * BLOCK + 7
    words = f"rank 1 differs from the other 2, {float(at)} on rank 0 and -1.0 on rank 1"
    assert found == [Difference(1, at, words)] * 3
    found = run_ranks(2, _compared, _change(0, 5, 0, 9, torch.bfloat16))
    assert (
        found
        == [Difference(1, 5, "rank 0 differs from rank 1, 0.0 on rank 0 and 5.0 on rank 1")] * 2
    )


def test_shapes_and_element_types_are_compared() -> None:
    for make in (
        lambda rank: [torch.zeros(4 + rank)],
        lambda rank: [torch.zeros(4, dtype=DTYPES[rank])],
    ):
        (found, _) = run_ranks(2, _compared, make)
        assert found == Difference(0, None, "rank 0 differs from rank 1, in shape or element type")


def test_equal_values_are_no_difference() -> None:
    assert run_ranks(
        2, _compared, lambda rank: [torch.full((3,), torch.nan), torch.ones(2, 3).t()]
    ) == [None, None]


class _Calls(TorchDispatchMode):
    """Counts collectives as a recorder sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def test_a_recorder_does_not_see_the_comparisons() -> None:
    assert run_ranks(2, _seen) == [1, 1]


def _seen() -> int:
    axis = Mesh({"tp": 2}, watch=Sanitizer(CPU)).axis("tp")
    with _Calls() as calls:
        all_reduce(torch.ones(3), axis)
    return calls.count


# ---- coercions called from here


def _message(function: Callable[[Axis, Tensor], None]) -> str:
    """What the sanitizer says when the function is called with an axis and a value, equal on
    both ranks.
    """
    mesh = Mesh({"tp": 2}, watch=Sanitizer(CPU))
    try:
        function(mesh.axis("tp"), torch.arange(4.0).requires_grad_())
    except RunError as error:
        return str(error)
    return ""


def _odd(x: Tensor) -> Tensor:
    """x, of which rank 1 has another element 2."""
    return x + torch.tensor([0.0, 0, 1, 0]) * dist.get_rank()


def _operand(tp: Axis, x: Tensor) -> None:
    a = _odd(x)
    replicate(a, tp)  # [h]  I→R  model.scale:7


def _nested(tp: Axis, x: Tensor) -> None:
    # [h]  I→S(h)  model.scale:7
    shard(_odd(x), tp, dim=0).sum()


def _gradient(tp: Axis, x: Tensor) -> None:
    a = all_reduce(x, tp)  # [h]  P→I  model.scale:7
    (a * a).sum().backward()
    a = all_reduce(x, tp)  # [h]  P→I  model.scale:7
    _odd(a.detach()).mul(a).sum().backward()


def _conjugate(tp: Axis, x: Tensor) -> None:
    collectives._reduce_scatter_gather = collectives._conjugate(
        "Lost", "PS", collectives._scatter, _wrong_gather
    )
    a = reduce_scatter(x, tp, dim=0)  # [h]  P→S(h)  model.scale:7
    a.sum().backward()


def _wrong_gather(x: Tensor, axis: Axis, dim: int, zigzag: bool) -> Tensor:
    return _odd(torch.cat([x, x]))


def _again(tp: Axis, x: Tensor) -> None:
    with regather(x[:2], tp, dim=0) as a:  # model.scale:7
        y = (a * a).sum()
    collectives.gather = _wrong_gather
    y.backward()


def _in_place(tp: Axis, x: Tensor) -> None:
    dist.all_reduce = lambda *_, **__: None
    a = _odd(x.detach())
    all_reduce_(a, tp)  # [h]  P→I  model.scale:7


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            _operand,
            "forward: `a` at [2] is not the same over tp: rank 0 differs from rank 1, 2.0 on"
            " rank 0 and 3.0 on",
        ),
        (_nested, "forward: `_odd(x)` at [2] is not the same over tp"),
        (_gradient, "backward: the gradient of `a` at [2] is not the same over tp"),
        (_conjugate, "backward: the gradient of `x` at [2] is not the same over tp"),
        (_again, "backward: `a` at [2] is not the same over tp"),
        (_in_place, "forward: `a` at [2] is not the same over tp"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_operands_and_results_of_coercions_are_compared(
    function: Callable[[Axis, Tensor], None], words: str
) -> None:
    messages = run_ranks(2, _message, function)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"before the first step, {words}")
    assert "; at model.scale:7, test_sanitize.py:" in messages[0]


def test_what_is_partial_or_sharded_may_differ() -> None:
    assert run_ranks(2, _message, _sharded) == ["", ""]


def _sharded(tp: Axis, x: Tensor) -> None:
    a = all_gather(_odd(x), tp, dim=0)
    (reduce_scatter(_odd(a[:4]), tp, dim=0) * (1 + tp.rank)).sum().backward()


def test_without_the_sanitizer_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, scalec.runtime; print([m for m in sys.modules if 'sanitize' in m or"
        " 'fingerprint' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ops_without_a_deterministic_form_are_refused() -> None:
    code = """
import torch
from scalec.runtime.debug.sanitize import require_determinism
require_determinism()
torch.zeros(4).put_(torch.tensor([1, 1]), torch.ones(2), accumulate=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "RuntimeError: put_ does not have a deterministic implementation" in done.stderr
