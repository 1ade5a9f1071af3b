"""Each coercion against the adjoint identity <g, Cx>_b = <C*g, x>_a, and `regather` against
`all_gather`.

<u, v>_p sums u · v over ranks, divided by their number where the placement p is I: an invariant
counts once.
"""

import time
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import linear

from helpers.forked_ranks import HANGS, run_ranks
from scalec.runtime import (
    Axis,
    Mesh,
    all_gather,
    all_gather_invariant,
    all_reduce,
    all_reduce_,
    all_to_all,
    invariant,
    once,
    once_replicated,
    pad_shard,
    reduce_scatter,
    regather,
    replicate,
    shard,
    take_shard,
)

Coercion = Callable[[Tensor, Axis], Tensor]

# (forward, placement before, placement after); Z is S with a zigzag
TABLE: dict[str, tuple[Coercion, str, str]] = {
    "replicate": (replicate, "I", "R"),
    "all_reduce": (all_reduce, "P", "I"),
    "all_gather 0": (lambda x, axis: all_gather(x, axis, dim=0), "S0", "R"),
    "all_gather 1": (lambda x, axis: all_gather(x, axis, dim=1), "S1", "R"),
    "reduce_scatter 0": (lambda x, axis: reduce_scatter(x, axis, dim=0), "P", "S0"),
    "reduce_scatter 2": (lambda x, axis: reduce_scatter(x, axis, dim=2), "P", "S2"),
    "all_gather_invariant": (lambda x, axis: all_gather_invariant(x, axis, dim=1), "S1", "I"),
    "shard": (lambda x, axis: shard(x, axis, dim=1), "I", "S1"),
    "take_shard": (lambda x, axis: take_shard(x, axis, dim=0), "R", "S0"),
    "pad_shard": (lambda x, axis: pad_shard(x, axis, dim=2), "S2", "P"),
    "all_to_all 0 1": (lambda x, axis: all_to_all(x, axis, dim_from=0, dim_to=1), "S0", "S1"),
    "all_to_all 2 0": (lambda x, axis: all_to_all(x, axis, dim_from=2, dim_to=0), "S2", "S0"),
    "all_gather 0, zigzag": (lambda x, axis: all_gather(x, axis, dim=0, zigzag=True), "Z0", "R"),
    "all_gather 1, zigzag": (lambda x, axis: all_gather(x, axis, dim=1, zigzag=True), "Z1", "R"),
    "reduce_scatter 0, zigzag": (
        lambda x, axis: reduce_scatter(x, axis, dim=0, zigzag=True),
        "P",
        "Z0",
    ),
    "reduce_scatter 1, zigzag": (
        lambda x, axis: reduce_scatter(x, axis, dim=1, zigzag=True),
        "P",
        "Z1",
    ),
    "all_gather_invariant, zigzag": (
        lambda x, axis: all_gather_invariant(x, axis, dim=1, zigzag=True),
        "Z1",
        "I",
    ),
    "shard, zigzag": (lambda x, axis: shard(x, axis, dim=1, zigzag=True), "I", "Z1"),
    "take_shard, zigzag": (lambda x, axis: take_shard(x, axis, dim=0, zigzag=True), "R", "Z0"),
    "pad_shard, zigzag": (lambda x, axis: pad_shard(x, axis, dim=1, zigzag=True), "Z1", "P"),
    "all_to_all 0 2, from zigzag": (
        lambda x, axis: all_to_all(x, axis, 0, 2, zigzag_from=True),
        "Z0",
        "S2",
    ),
    "all_to_all 1 0, from zigzag": (
        lambda x, axis: all_to_all(x, axis, 1, 0, zigzag_from=True),
        "Z1",
        "S0",
    ),
    "all_to_all 2 1, to zigzag": (
        lambda x, axis: all_to_all(x, axis, 2, 1, zigzag_to=True),
        "S2",
        "Z1",
    ),
    "all_to_all 1 0, both zigzag": (
        lambda x, axis: all_to_all(x, axis, 1, 0, True, True),
        "Z1",
        "Z0",
    ),
    "once": (once, "I", "P"),
    "invariant": (invariant, "R", "I"),
    "once_replicated": (once_replicated, "R", "P"),
}
DUAL = {"R": "P", "P": "R"}
"""Of the others, each is its own."""
GLOBAL = (24, 24, 24)


def zigzag_positions(size: int, ranks: int, rank: int) -> list[int]:
    """A rank's positions where a zigzag cuts `size`."""
    each = size // (2 * ranks)
    return [at for at in range(size) if at // each == rank] + [
        at for at in range(size) if at // each == 2 * ranks - 1 - rank
    ]


def _value(placement: str, axis: Axis, seed: int) -> Tensor:
    """A random value with this placement: this rank's part."""
    own = seed * 100 + (axis.rank + 1 if placement == "P" else 0)
    whole = torch.randn(GLOBAL, dtype=torch.float64, generator=torch.Generator().manual_seed(own))
    if placement[0] == "Z":
        return whole.index_select(
            dim := int(placement[1]),
            torch.tensor(zigzag_positions(GLOBAL[dim], axis.size, axis.rank)),
        )
    return whole.chunk(axis.size, int(placement[1]))[axis.rank] if placement[0] == "S" else whole


def _meaning(x: Tensor, placement: str, axis: Axis) -> Tensor:
    """The global value that the ranks' parts stand for."""
    if placement[0] in "SZ":
        whole = all_gather(x, axis, dim := int(placement[1]))
        held = [
            at for rank in range(axis.size) for at in zigzag_positions(GLOBAL[dim], axis.size, rank)
        ]
        return (
            whole
            if placement[0] == "S"
            else torch.empty_like(whole).index_copy(dim, torch.tensor(held), whole)
        )
    return all_reduce_(x.clone(), axis) if placement == "P" else x


def _inner(u: Tensor, v: Tensor, placement: str, axis: Axis) -> float:
    total = all_reduce_((u * v).sum(), axis).item()
    return total / axis.size if placement == "I" else total


def _check(name: str) -> None:
    axis = Mesh({"tp": torch.distributed.get_world_size()}).axis("tp")
    coercion, before, after = TABLE[name]
    x = _value(before, axis, 1).requires_grad_()
    y = coercion(x, axis)
    assert torch.allclose(_meaning(y.detach(), after, axis), _meaning(x.detach(), before, axis)), (
        "another value"
    )
    g = _value(DUAL.get(after, after), axis, 2)
    y.backward(g)
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert _inner(g, y.detach(), after, axis) == pytest.approx(
        _inner(x.grad, x.detach(), before, axis), rel=1e-12
    )
    expected = _meaning(g, DUAL.get(after, after), axis)
    assert torch.allclose(_meaning(x.grad, DUAL.get(before, before), axis), expected), (
        "another gradient"
    )


def _check_all() -> None:
    for name in TABLE:
        try:
            _check(name)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_coercion_keeps_the_value_and_is_adjoint_to_its_backward(world: int) -> None:
    run_ranks(world, _check_all)


def _check_graphs() -> None:
    """In a graph, each is as it is outside of one."""
    axis = Mesh({"tp": 2}).axis("tp")
    for name in GRAPHS:
        coercion, before, after = TABLE[name]
        torch.compiler.reset()  # pyright: ignore[reportUnknownMemberType]
        graph = torch.compile(lambda x: coercion(x, axis), backend="aot_eager", fullgraph=True)  # noqa: B023
        g, results = _value(DUAL.get(after, after), axis, 2), []
        for run in (coercion, lambda x, _: graph(x)):  # noqa: B023
            x = _value(before, axis, 1).requires_grad_()
            y = run(x, axis)
            results.append((y.detach(), *torch.autograd.grad(y, x, g)))
        torch.testing.assert_close(*results, rtol=0, atol=0, msg=lambda text: f"{name}: {text}")  # noqa: B023


GRAPHS = [f"{name}, zigzag" for name in ("all_gather 1", "reduce_scatter 0", "shard", "pad_shard")]
GRAPHS.append("all_to_all 0 2, from zigzag")


def test_zigzags_are_the_same_in_a_graph() -> None:
    run_ranks(2, _check_graphs, functional=True)


def test_on_one_rank_every_coercion_is_the_identity() -> None:
    axis = Mesh({"tp": 1}).axis("tp")
    x = torch.randn(2, 2, 2)
    assert all(coercion(x, axis) is x for coercion, _, _ in TABLE.values())


def _max() -> None:
    axis = Mesh({"tp": 2}).axis("tp")
    x = torch.tensor([axis.rank, -axis.rank], dtype=torch.float64, requires_grad=True)
    y = all_reduce(x, axis, op="max")
    assert y.tolist() == [1, 0]
    assert not y.requires_grad


def test_a_maximum_has_no_gradient() -> None:
    run_ranks(2, _max)


def _taken_gradient(parameter: Tensor) -> Tensor:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    return gradient


def _compare_regather() -> None:
    axis = Mesh({"tp": 2}).axis("tp")
    for zigzag in (False, True):
        _compare_gathered(axis, zigzag)


def _compare_gathered(axis: Axis, zigzag: bool) -> None:
    torch.manual_seed(axis.rank)
    x, w, u = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def use(a: Tensor) -> Tensor:
        views = a[2:].unflatten(1, (2, 2)).transpose(1, 2).flatten(1)
        return (linear(a, w).exp()[2:] * linear(a[1:], u)[1:] * views).sum()

    use(all_gather(x, axis, dim=0, zigzag=zigzag)).backward()
    expected = [_taken_gradient(p) for p in (x, w, u)]
    with CommDebugMode() as forward, regather(x, axis, dim=0, zigzag=zigzag) as full:
        loss = use(full)
    assert _counts(forward) == {"_allgather_base_": 1}
    for _ in range(3):
        with CommDebugMode() as backward:
            loss.backward(retain_graph=True)
        assert _counts(backward) == {"_allgather_base_": 1, "_reduce_scatter_base_": 1}
        for parameter, gradient in zip((x, w, u), expected, strict=True):
            assert torch.equal(_taken_gradient(parameter), gradient)


def _counts(mode: CommDebugMode) -> dict[str, int]:
    return {str(op).rsplit(".", 1)[-1]: count for op, count in mode.get_comm_counts().items()}


def test_regather_gathers_once_more_and_gives_the_same_gradients() -> None:
    run_ranks(2, _compare_regather)


def _lives(watched: weakref.ref[Tensor]) -> bool:
    """Whether a tensor stays although gloo's own thread, which may hold it longer than we do,
    had time to let it go.
    """
    deadline = time.monotonic() + HANGS
    while watched() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    return watched() is not None


def _gathered_lives() -> tuple[bool, bool]:
    """Whether the gathered tensor is there between forward and backward: (saved, to be gathered
    again).
    """
    axis = Mesh({"tp": 2}).axis("tp")
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    saved = all_gather(x, axis, dim=0)
    kept = linear(saved, w).sum()
    with regather(x, axis, dim=0) as again:
        freed = linear(again, w).sum()
    watched = weakref.ref(saved), weakref.ref(again)
    del saved, again
    freed_lives = _lives(watched[1])
    lives = watched[0]() is not None, freed_lives
    (kept + freed).backward()
    return lives


def test_between_forward_and_backward_the_gathered_tensor_is_freed() -> None:
    assert run_ranks(2, _gathered_lives) == [(True, False)] * 2
