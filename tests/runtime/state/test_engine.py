"""The state engine against torch.optim, parameter by parameter."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from helpers.forked_ranks import HANGS
from scalec.runtime import SGD, AdamW, Bucket, Mesh, ParamGroup, TrainState, normal, ones, weight

BUCKETS = {
    "norms": Bucket(ParamGroup("layers.*.norm")),
    "rest": Bucket(ParamGroup("out", lr_scale=0.5), ParamGroup("layers.*.w", weight_decay=0.1)),
}


class _Layer(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.norm = weight(mesh, 4, init=ones())
        self.w = weight(mesh, 4, 4, init=normal(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) * self.norm


class _Model(nn.Module):
    """`unused` names `out` a second time: tied."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(mesh) for _ in range(2))
        self.out = weight(mesh, 3, 4, init=normal(0.5))
        self.tied = self.out

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x @ self.out.T @ self.tied).square().sum()


def _made(
    optimizer: AdamW | SGD, dtype: torch.dtype = torch.float64, master: torch.dtype = torch.float64
):
    mesh = Mesh({})
    model = _Model(mesh)
    state = TrainState(model, mesh, BUCKETS, optimizer, dtype, master)
    state.initialise(seed=0)
    return model, state


def _input(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).to(
        dtype
    )


def _gather(model: nn.Module, step: int, dtype: torch.dtype = torch.float64) -> None:
    for microbatch in range(2):
        model(_input(2 * step + microbatch, dtype)).backward()


def _update(
    model: nn.Module,
    state: TrainState,
    step: int,
    dtype: torch.dtype = torch.float64,
    skip: bool = False,
) -> None:
    _gather(model, step, dtype)
    state.update(
        0.1 / (step + 1), scale=torch.tensor(0.25, dtype=torch.float64), skip=torch.tensor(skip)
    )


def _plain(
    parameters: dict[str, Tensor], optimizer: AdamW | SGD, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Three steps of torch's optimizer, not fused, on separate parameters."""
    model = _Model(Mesh({}))
    own: dict[str, Tensor] = {
        name: nn.Parameter(value.clone()) for name, value in parameters.items()
    }
    groups = [
        {
            "params": [p],
            "scale": 0.5 if name == "out" else 1.0,
            "weight_decay": 0.1 if name.endswith(".w") else 0.0,
        }
        for name, p in own.items()
    ]
    if isinstance(optimizer, AdamW):
        torchs: torch.optim.Optimizer = torch.optim.AdamW(
            groups, betas=optimizer.betas, eps=optimizer.eps
        )
    else:
        torchs = torch.optim.SGD(groups, momentum=optimizer.momentum)
    for step in range(3):
        tied = {**own, "tied": own["out"]}
        for microbatch in range(2):
            torch.func.functional_call(
                model, tied, (_input(2 * step + microbatch, dtype),)
            ).backward()
        for group in torchs.param_groups:
            group["lr"] = 0.1 / (step + 1) * group["scale"]
            for p in group["params"]:
                p.grad *= 0.25
        torchs.step()
        torchs.zero_grad()
    return {name: p.detach() for name, p in own.items()}


OPTIMIZERS = [AdamW(betas=(0.9, 0.95)), SGD(), SGD(momentum=0.9)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_three_steps_equal_torchs_optimizer(
    optimizer: AdamW | SGD, dtype: torch.dtype, tolerance: float
) -> None:
    model, state = _made(optimizer, dtype, dtype)
    expected = _plain({name: p.detach() for name, p in model.named_parameters()}, optimizer, dtype)
    for step in range(3):
        _update(model, state, step, dtype, skip=step == 1)  # without effect on what follows
        if step == 1:
            _update(model, state, step, dtype)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected[name], atol=tolerance, rtol=tolerance
        )


def test_without_a_scale_gradients_count_as_they_are() -> None:
    (model, state), (other, scaled) = _made(AdamW()), _made(AdamW())
    for step in range(2):
        _gather(model, step)
        _gather(other, step)
        state.update(0.1, skip=torch.tensor(False))
        scaled.update(0.1, skip=torch.tensor(False), scale=torch.tensor(1.0))
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert not any(gradient.any() for gradient in state.gradients().values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_skipped_step_changes_nothing_but_the_gradients(optimizer: AdamW | SGD) -> None:
    (model, state), (other, unskipped) = _made(optimizer), _made(optimizer)
    _update(model, state, 0, skip=True)  # before the optimizer has any history
    assert not any(gradient.any() for gradient in state.gradients().values())
    _update(model, state, 1)
    _update(other, unskipped, 1)
    _update(model, state, 2, skip=True)
    ours, theirs = state.state_dict(), unskipped.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.flatten()


def test_parameters_and_gradients_are_views_of_flat_buckets() -> None:
    model, state = _made(AdamW())
    gradients = state.gradients()
    assert {name: len(flat) for name, flat in gradients.items()} == {"norms": 8, "rest": 12 + 32}
    model(_input(0)).backward()
    parameters = dict(model.named_parameters())
    in_order = ["out", "layers.0.w", "layers.1.w"]
    assert torch.equal(
        torch.cat([_gradient(parameters[name]) for name in in_order]), gradients["rest"]
    )
    assert gradients["rest"].any()
    state.zero()
    assert not gradients["rest"].any()
    assert model.tied is model.out


def test_bfloat16_trains_float32_masters_and_accumulates_in_float32() -> None:
    model, state = _made(AdamW(), torch.bfloat16, torch.float32)
    model(_input(0, torch.bfloat16)).backward()
    model(_input(1, torch.bfloat16)).backward()
    total = state.gradients()["rest"].clone()
    assert total.dtype == torch.float32
    assert all(p.grad is None and p.dtype == torch.bfloat16 for p in model.parameters())
    state.zero()
    parts = []
    for step in range(2):
        model(_input(step, torch.bfloat16)).backward()
        parts.append(state.gradients()["rest"].clone())
        state.zero()
    assert torch.equal(total, parts[0] + parts[1])
    before = state.state_dict()["out"].clone()
    assert before.dtype == torch.float32
    for step in range(3):
        _update(model, state, step, torch.bfloat16)
    after = state.state_dict()["out"]
    assert torch.equal(model.out, after.bfloat16())
    assert not torch.equal(after, after.bfloat16().float())
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ({"a": Bucket(ParamGroup("layers.*.norm", "layers.*.w"))}, "in no bucket: out"),
        (
            {"a": Bucket(ParamGroup("layers.*.norm", "layers.*.w", "out", "head"))},
            "`head` matches no",
        ),
        (
            {"a": Bucket(ParamGroup("layers.*.*", "out")), "b": Bucket(ParamGroup("out"))},
            "`out` matches no",
        ),
        # `*` stands for one part of a name
        ({"a": Bucket(ParamGroup("*"))}, "in no bucket: layers"),
    ],
)
def test_buckets_share_out_all_parameters(buckets: dict[str, Bucket], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        TrainState(_Model(Mesh({})), Mesh({}), buckets, SGD())


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_values_go_from_one_state_to_another(optimizer: AdamW | SGD) -> None:
    (model, state), (other, copy) = _made(optimizer), _made(optimizer)
    _update(model, state, 0)
    copy.load_state_dict({key: value.clone() for key, value in state.state_dict().items()})
    for updated in (partial(_update, model, state), partial(_update, other, copy)):
        updated(1)
    ours, theirs = state.state_dict(), copy.state_dict()
    assert ours["optimizer/step"] == 2
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


SMALL_STEP = """
import sys, torch
from scalec.runtime import AdamW, Bucket, ParamGroup, Mesh, TrainState, ones, weight
mesh, model = Mesh({}), torch.nn.Module()
model.w = weight(mesh, 2, init=ones())
state = TrainState(model, mesh, {"all": Bucket(ParamGroup("w"))}, AdamW())
model.w.square().sum().backward()
state.update(0.1, skip=torch.tensor(False))
print(sorted(sys.modules.keys() & {"sympy", "torch._dynamo", "torch.distributed.tensor"}))
"""


def test_a_step_imports_nothing_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL_STEP],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=True,
    )
    assert done.stdout == "[]\n"
