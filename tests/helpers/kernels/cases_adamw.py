"""AdamW in one pass against torch.optim.AdamW in float64."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from helpers.kernels.cases import PRECISIONS, Precision, check_equal
from scalec.runtime import Bucket, Mesh, TrainState, normal, weight
from scalec.runtime.kernels import AdamW, Tile
from scalec.runtime.state import optimizers
from scalec.runtime.state.optimizers import ParamGroup, Part

LR, STEPS = 0.01, 3
GROUP = ParamGroup("*", weight_decay=0.1, lr_scale=0.5)
PARAMETERS = {
    device: tuple(it for it in precisions if it.dtype != torch.float16)
    for device, precisions in PRECISIONS.items()
}
"""Without float16, in which squares of gradients vanish: it has masters."""
SIZES = [(1, 1), (2, 7), (3, 127), (1, 300)]


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(
    layers: int,
    size: int,
    precision: Precision,
    device: str,
    copies: torch.dtype | None,
    odd: int = 0,
) -> Part:
    """A part that begins `odd` elements into layers which are longer than it by twice that."""

    def empty(dtype: torch.dtype) -> Tensor:
        return torch.zeros(layers, size + 2 * odd, dtype=dtype, device=device)[:, odd : odd + size]

    parameters = empty(precision.dtype).copy_(_numbers(layers, size, seed=0))
    slots = {slot: empty(precision.dtype) for slot in ("exp_avg", "exp_avg_sq")}
    return Part(
        GROUP, parameters, empty(precision.dtype), slots, None if copies is None else empty(copies)
    )


def _gradient(part: Part, step: int) -> Tensor:
    return _numbers(*part.parameters.shape, seed=step).to(part.gradients.dtype)


def _scalar(value: float, device: str) -> Tensor:
    return torch.full((), float(value), device=device)


def check_steps(part: Part, optimizer: AdamW, precision: Precision, scale: float | None) -> None:
    """Some steps beside torch's optimizer; before each, one that is skipped for gradients that
    are not finite.
    """
    device = part.parameters.device.type
    expected = part.parameters.to("cpu", torch.float64).clone().requires_grad_()
    lr = LR * GROUP.lr_scale
    theirs = torch.optim.AdamW(
        [expected], lr=lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=0.1
    )
    factor = None if scale is None else _scalar(scale, device)
    for step in range(1, STEPS + 1):
        part.gradients.fill_(torch.nan)
        optimizer.update(part, LR, _scalar(step, device), _scalar(1.0, device), factor)
        gradient = _gradient(part, step)
        part.gradients.copy_(gradient)
        optimizer.update(part, LR, _scalar(step, device), _scalar(0.0, device), factor)
        expected.grad = gradient.double() * (1.0 if scale is None else scale)
        theirs.step()
    check_equal(part.parameters, expected, precision)
    for slot in optimizer.slots if expected.numel() else ():
        check_equal(part.slots[slot], theirs.state[expected][slot], precision)
    if part.copies is not None:
        assert torch.equal(part.copies, part.parameters.to(part.copies.dtype))


def case_three_steps_and_skipped_ones(device: str) -> None:
    for precision in PARAMETERS[device]:
        for layers, size in SIZES:
            part = made(layers, size, precision, device, None)
            check_steps(part, AdamW((0.9, 0.95), 1e-8, Tile(1, 4, columns=128)), precision, 0.25)


def case_without_a_scale(device: str) -> None:
    for precision in PARAMETERS[device]:
        check_steps(made(1, 33, precision, device, None), AdamW(), precision, None)


def case_slices_of_longer_layers(device: str) -> None:
    """Memory around a part stays as it is."""
    for precision in PARAMETERS[device]:
        part = made(3, 130, precision, device, torch.float16, odd=5)
        check_steps(part, AdamW(tile=Tile(1, 4, columns=64)), precision, 2.0)
        for flat in (part.parameters, part.gradients, part.slots["exp_avg_sq"], part.copies):
            assert flat is not None
            whole = torch.as_strided(flat, (3, 140), (140, 1), 0)
            assert not whole[:, :5].any()
            assert not whole[:, -5:].any()


def case_copies(device: str) -> None:
    """In the type that the model computes in; the interpreter casts to bfloat16 wrongly."""
    narrow = [torch.float16] if device == "cpu" else [torch.float16, torch.bfloat16]
    for dtype in narrow:
        precision = PRECISIONS[device][0]
        check_steps(made(2, 100, precision, device, dtype), AdamW(), precision, 0.5)


def case_betas_of_zero_and_close_to_one(device: str) -> None:
    """The correction of bias has all its digits, at the first step too."""
    precision = PRECISIONS[device][0]
    for betas in ((0.0, 0.0), (0.5, 0.9999), (0.9, 0.999999)):
        check_steps(made(1, 64, precision, device, None), AdamW(betas=betas), precision, 1.0)


def case_late_steps(device: str) -> None:
    """After a million steps nothing is left to correct."""
    precision = PRECISIONS[device][0]
    part = made(1, 64, precision, device, None)
    part.gradients.fill_(0.5)
    part.slots["exp_avg"].fill_(0.5)
    part.slots["exp_avg_sq"].fill_(0.25)
    before = part.parameters.double().cpu()
    AdamW().update(part, LR, _scalar(1e6, device), _scalar(0.0, device))
    lr = LR * GROUP.lr_scale
    check_equal(part.parameters, before * (1 - lr * GROUP.weight_decay) - lr, precision)


def case_no_elements(device: str) -> None:
    precision = PRECISIONS[device][0]
    check_steps(made(2, 0, precision, device, torch.float16), AdamW(), precision, 1.0)


class _Layer(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = weight(mesh, 4, init=normal(1.0))
        self.w = weight(mesh, 4, 5, init=normal(1.0))


class _Model(nn.Module):
    """Layers whose buckets have two groups, so that a part is a slice of each layer."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(mesh) for _ in range(3))
        self.out = weight(mesh, 3, 7, init=normal(1.0))


def states(
    optimizer: optimizers.AdamW, device: str, dtype: torch.dtype, master: torch.dtype
) -> tuple[nn.Module, Mapping[str, Tensor]]:
    """A model after two updates and one that is skipped, and what a checkpoint would have of it."""
    mesh = Mesh({}, device)
    model = _Model(mesh)
    decaying, plain = ParamGroup("layers.*.w", weight_decay=0.1), ParamGroup("layers.*.norm")
    buckets = {
        "layers": Bucket(plain, decaying, per_layer=True),
        "rest": Bucket(ParamGroup("out", lr_scale=0.5)),
    }
    state = TrainState(model, mesh, buckets, optimizer, dtype, master)
    state.initialise(seed=0)
    for step in range(3):
        for i, gradient in enumerate(state.gradients().values()):
            gradient.copy_(_numbers(*gradient.shape, seed=10 * step + i))
        state.update(LR, skip=torch.tensor(step == 1, device=device), scale=_scalar(0.5, device))
        assert not any(gradient.any() for gradient in state.gradients().values())
    return model, state.state_dict()


def case_the_state_of_a_model(device: str) -> None:
    """Beside torch's kernels, with masters: the same names and values, and the model computes
    with these.
    """
    model, ours = states(AdamW(tile=Tile(1, 4, columns=16)), device, torch.float16, torch.float32)
    _, theirs = states(optimizers.AdamW(), device, torch.float16, torch.float32)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-6, rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), ours[name].half())


def examples(device: str, dtype: torch.dtype) -> None:
    """Masters with copies, parameters without, and a part that begins anywhere."""
    one = torch.empty((), device=device)
    for layers, size, odd, copies in (
        (32, 54_525_952, 0, dtype),
        (1, 3 << 30, 0, None),
        (32, 8191, 1, dtype),
    ):
        flat = torch.empty(layers, size + odd, device=device)[:, odd:]
        narrow = (
            None
            if copies is None
            else torch.empty(layers, size + odd, dtype=copies, device=device)[:, odd:]
        )
        part = Part(GROUP, flat, flat, {"exp_avg": flat, "exp_avg_sq": flat}, narrow)
        AdamW((0.9, 0.95)).update(part, 3e-4, one, one, one)
        AdamW((0.9, 0.95)).update(part, 3e-4, one, one)
