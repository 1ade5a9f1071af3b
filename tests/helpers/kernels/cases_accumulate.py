"""Sums of gradients in another element type."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from scalec.runtime import SGD, Bucket, Mesh, ParamGroup, TrainState, normal, weight
from scalec.runtime.kernels import Accumulate, Tile

SMALL = Accumulate(Tile(rows=1, warps=4, columns=64))
PAIRS = {"cpu": [torch.float16], "cuda": [torch.float16, torch.bfloat16]}
"""Element types that are added to float32; the interpreter reads bfloat16 too, but on the CPU
that would say little.
"""


def _numbers(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def case_sizes(device: str) -> None:
    """In float32 each sum is rounded once, as torch rounds it."""
    for dtype in PAIRS[device]:
        for shape in ((1,), (7,), (127,), (64, 3), (0, 5)):
            total, x = (
                _numbers(*shape, seed=0, device=device),
                _numbers(*shape, seed=1, device=device).to(dtype),
            )
            expected = total + x
            SMALL(total, x)
            assert torch.equal(total, expected)


def case_a_stretch_of_a_buffer(device: str) -> None:
    """Memory around it stays as it is; x may have gaps."""
    flat = _numbers(300, seed=0, device=device)
    x = _numbers(9, 22, seed=1, device=device).half()[:, ::2]
    before, expected = flat.clone(), flat[101:200].view(9, 11) + x
    SMALL(flat[101:200].view(9, 11), x)
    assert torch.equal(flat[101:200].view(9, 11), expected)
    assert torch.equal(flat[:101], before[:101])
    assert torch.equal(flat[200:], before[200:])


def case_what_torch_does(device: str) -> None:
    """One element type, or a sum with gaps."""
    x = _numbers(4, 6, seed=1, device=device)
    for total in (torch.zeros(4, 6, device=device), torch.zeros(4, 12, device=device)[:, ::2]):
        SMALL(total, x if total.is_contiguous() else x.half())
        assert torch.equal(total, x if total.is_contiguous() else x.half().float())


class _Model(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.w = weight(mesh, 7, 5, init=normal(1.0))
        self.bias = weight(mesh, 5, init=normal(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w + self.bias).square().sum()


def _gradient(accumulate: Callable[[Tensor, Tensor], object], device: str) -> Tensor:
    """That of two microbatches in float16, in float32."""
    mesh = Mesh({}, device)
    model = _Model(mesh)
    bucket = Bucket(ParamGroup("w", "bias"))
    state = TrainState(
        model, mesh, {"all": bucket}, SGD(), torch.float16, torch.float32, accumulate
    )
    state.initialise(seed=0)
    for seed in (1, 2):
        model(_numbers(3, 7, seed=seed, device=device).half()).backward()
    return state.gradients()["all"]


def case_the_gradients_of_a_model(device: str) -> None:
    ours, theirs = _gradient(SMALL, device), _gradient(Tensor.add_, device)
    assert theirs.any()
    assert torch.equal(ours, theirs)


def examples(device: str, dtype: torch.dtype) -> None:
    """A weight of an 8B-shaped model, a norm's, and more elements than 32 bits count."""
    for shape, sums in (
        ((14336, 4096), torch.float32),
        ((4096,), torch.float32),
        ((1 << 20, 4096), torch.float32),
    ):
        other = dtype if dtype != sums else torch.float16
        Accumulate()(
            torch.empty(shape, dtype=sums, device=device),
            torch.empty(shape, dtype=other, device=device),
        )
