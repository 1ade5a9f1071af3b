"""`.venv/bin/python benchmarks/host_overhead.py`: host time of a layer, forward and backward, beside plain torch.

One rank of many, whose process group does nothing, and tensors so small that only the host's work shows.  Beside the
emitted layer: a plain module of the same local shapes (bar: 1.4 times that), and the whole layer spread by DTensor and,
with dp, FSDP2, which gathers weights and reduces gradients in each pass: emitted programs do that once a step.

Where the time goes: the emitted layer compiled for one rank of the same local shapes does not communicate; the
coercions alone are timed in a chain; and so are the calls of the fake group, which is no part of a real run.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from time import process_time
from types import ModuleType
from typing import Any

import dtensor
import plain
import torch
import torch.distributed as dist
from emitted import Sizes, program
from measure import asked_quick, in_turns, ratio, table, where
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalec.runtime import Mesh, all_gather, all_reduce, reduce_scatter, replicate

TP = 8
SIZES = Sizes(hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=128, layers=8, seq=16, rows=1)
LOCAL = replace(SIZES, heads=SIZES.heads // TP, kv_heads=SIZES.kv_heads // TP, ffn=SIZES.ffn // TP)
COERCIONS = "two pairs of coercions"
CALLS = "the fake group's own calls"
Pass = Callable[[], float]


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, layers: list[nn.Module], *positions: Tensor) -> None:
        super().__init__()
        self.layers, self.positions = nn.ModuleList(layers), positions

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, *self.positions)
        return x


def main() -> None:
    quick = asked_quick(__doc__)
    torch.set_num_threads(1)
    cases = [(dp, sequence_parallel) for sequence_parallel in (False, True) for dp in (1, 2)]
    measured = {case: _measured(*case, rounds=3 if quick else 200) for case in cases}
    print(f"{where()}, one thread")
    columns = ("mesh", "plain", "emitted", "ratio", "DTensor (FSDP2 if dp > 1)", "ratio")
    table("Host time of a layer, forward and backward", columns, [_totals(*case, measured[case]) for case in cases])
    columns = ("mesh", "emitted", "without communication", COERCIONS, f"of these: {CALLS}")
    table("Where it goes", columns, [_parts(*case, measured[case]) for case in cases])


def _measured(dp: int, sequence_parallel: bool, rounds: int) -> dict[str, list[float]]:
    with _fake_ranks(dp * TP):
        mesh = Mesh({"dp": dp, "tp": TP})
        candidates = {
            "plain": _pass(_plain(LOCAL), _input()),
            "emitted": _pass(*_emitted(program(SIZES, mesh.axes, sequence_parallel), mesh)),
            "without communication": _pass(*_emitted(program(LOCAL, {}), Mesh({}))),
            "DTensor": _pass(_spread(mesh, sequence_parallel), _input(TP if sequence_parallel else 1)),
            COERCIONS: _coercions(mesh, sequence_parallel),
            CALLS: _calls(mesh, sequence_parallel),
        }
        return in_turns(candidates, rounds)


@contextmanager
def _fake_ranks(count: int) -> Generator[None]:
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    yield
    dist.destroy_process_group()


def _input(parts: int = 1) -> Tensor:
    return torch.randn(SIZES.rows, SIZES.seq // parts, SIZES.hidden)


def _plain(sizes: Sizes) -> Stack:
    return Stack([plain.Layer(sizes) for _ in range(sizes.layers)], *plain.rotary(sizes))


def _emitted(module: ModuleType, mesh: Mesh) -> tuple[Stack, Tensor]:
    """The program's layers, and an input in their layout."""
    model: Any
    model, state = module.build(mesh)
    state.initialise(0)
    first_seq = module.PLAN.inputs["tokens"].dims == ("seq", "batch")
    x = _input(TP).transpose(0, 1).contiguous() if first_seq else _input()
    return Stack(list(model.layers), model.rotary), x


def _spread(mesh: Mesh, sequence_parallel: bool) -> Stack:
    stack = _plain(SIZES)
    assert mesh.device_mesh is not None
    for layer in stack.layers:
        dtensor.spread_layer(layer, mesh.device_mesh, sequence_parallel)
    return stack


def _pass(stack: Callable[[Tensor], Tensor], x: Tensor) -> Pass:
    """Forward and backward of as many layers as SIZES has; seconds of CPU time for each."""
    x.requires_grad_()
    with torch.no_grad():
        gradient = torch.ones_like(stack(x))

    def run() -> float:
        start = process_time()
        stack(x).backward(gradient)
        return (process_time() - start) / SIZES.layers

    return run


def _coercions(mesh: Mesh, sequence_parallel: bool) -> Pass:
    """What a layer communicates, around nothing."""
    tp = mesh.axis("tp")

    def pair(x: Tensor) -> Tensor:
        if sequence_parallel:
            return reduce_scatter(all_gather(x, tp, dim=0), tp, dim=0)
        return all_reduce(replicate(x, tp), tp)

    def chain(x: Tensor) -> Tensor:
        for _ in range(2 * SIZES.layers):
            x = pair(x)
        return x

    return _pass(chain, _input(TP).transpose(0, 1).contiguous() if sequence_parallel else _input())


def _calls(mesh: Mesh, sequence_parallel: bool) -> Pass:
    """The same calls of the group, without autograd and new tensors."""
    group, part, whole = mesh.axis("tp").group, _input(TP).squeeze(0), _input().squeeze(0)

    def calls() -> None:
        if sequence_parallel:
            group._allgather_base(whole, part).wait()
            group._reduce_scatter_base(part, whole).wait()
        else:
            group.allreduce([whole]).wait()

    def run() -> float:
        start = process_time()
        for _ in range(4 * SIZES.layers):
            calls()
        return (process_time() - start) / SIZES.layers

    return run


def _name(dp: int, sequence_parallel: bool) -> str:
    return f"dp {dp} × tp {TP}{', SP' if sequence_parallel else ''}"


def _microseconds(times: list[float]) -> str:
    return f"{median(times) * 1e6:.0f} µs"


def _totals(dp: int, sequence_parallel: bool, times: dict[str, list[float]]) -> tuple[str, ...]:
    against = partial(ratio, reference=times["plain"])
    cells = [cell for kind in ("emitted", "DTensor") for cell in (_microseconds(times[kind]), against(times[kind]))]
    return _name(dp, sequence_parallel), _microseconds(times["plain"]), *cells


def _parts(dp: int, sequence_parallel: bool, times: dict[str, list[float]]) -> tuple[str, ...]:
    kinds = ("emitted", "without communication", COERCIONS, CALLS)
    return _name(dp, sequence_parallel), *(_microseconds(times[kind]) for kind in kinds)


if __name__ == "__main__":
    main()
