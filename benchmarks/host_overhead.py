"""`.venv/bin/python benchmarks/host_overhead.py`: host time of a layer, forward and backward,
beside plain torch.

One rank of many, whose process group does nothing, and tensors so small that only the host's work
shows.  Beside the emitted layer: a plain module of the same local shapes (bar: 1.4 times that);
with sequence parallelism the same module with Megatron's gathers and scatters, written by hand on
torch.distributed's functions; and the whole layer spread by DTensor and, with dp, FSDP2, which
gathers weights and reduces gradients in each pass: emitted programs do that once a step.

Where the time goes: compiled for one rank of the same local shapes the layer does not communicate;
with a group whose calls return at once it has its coercions, autograd functions and new tensors;
with one that copies nothing it has the calls of the group too.  The rest is what the fake group
does instead of communicating: 8 copies for a gather, which in a real run is not the host's work.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import process_time
from types import ModuleType
from typing import Any, Self

import dtensor
import plain
import torch
import torch.distributed as dist
from emitted import Sizes, program
from measure import asked_quick, in_turns, ratio, table, where
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalec.runtime import Mesh

TP = 8
SIZES = Sizes(hidden=64, heads=8, kv_heads=8, head_dim=8, ffn=128, layers=8, seq=16, rows=1)
LOCAL = replace(SIZES, heads=SIZES.heads // TP, kv_heads=SIZES.kv_heads // TP, ffn=SIZES.ffn // TP)
Pass = Callable[[], float]


class Stack(nn.Module):
    """Layers one after another."""

    def __init__(self, layers: Sequence[nn.Module], *positions: Tensor) -> None:
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
    measured = {case: _measured(*case, rounds=3 if quick else 100) for case in cases}
    print(f"{where()}, one thread")
    columns = (
        "mesh",
        "plain",
        "by hand",
        "ratio",
        "emitted",
        "ratio",
        "DTensor (FSDP2 if dp > 1)",
        "ratio",
    )
    table(
        "Host time of a layer, forward and backward",
        columns,
        [_totals(*case, measured[case]) for case in cases],
    )
    columns = (
        "mesh",
        "no communication",
        "+ coercions",
        "+ calls",
        "+ fake copies",
        "all but these, beside plain",
    )
    table("Where it goes", columns, [_parts(*case, measured[case]) for case in cases])


def _measured(dp: int, sequence_parallel: bool, rounds: int) -> dict[str, list[float]]:
    with _fake_ranks(dp * TP):
        mesh = Mesh({"dp": dp, "tp": TP})
        split = program(SIZES, mesh.axes, sequence_parallel)
        candidates = {
            "plain": _pass(_plain(LOCAL), _input()),
            **_by_hand(mesh, sequence_parallel),
            "emitted": _pass(*_emitted(split, mesh)),
            "without copies": _pass(*_emitted(split, mesh, NoCopies(mesh.axis("tp").group))),
            "without calls": _pass(*_emitted(split, mesh, NoCalls())),
            "without communication": _pass(*_emitted(program(LOCAL, {}), Mesh({}))),
            "DTensor": _pass(
                _spread(mesh, sequence_parallel), _input(TP if sequence_parallel else 1)
            ),
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


def _by_hand(mesh: Mesh, sequence_parallel: bool) -> dict[str, Pass]:
    """Layers that communicate by hand, where they share the sequence."""
    if not sequence_parallel:
        return {}
    layers = [
        plain.SequenceParallelLayer(LOCAL, mesh.axis("tp").group) for _ in range(SIZES.layers)
    ]
    return {
        "by hand": _pass(
            Stack(layers, *plain.rotary(LOCAL)), _input(TP).transpose(0, 1).contiguous()
        )
    }


def _emitted(module: ModuleType, mesh: Mesh, group: Any = None) -> tuple[Stack, Tensor]:
    """The program's layers, on `group` if one is given, and an input in their layout."""
    model: Any
    model, state = module.build(mesh)
    state.initialise(0)
    if group:
        for layer in model.layers:
            layer.tp = replace(layer.tp, group=group)
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


class NoCalls:
    """In the place of a group: every collective is done before it begins."""

    def allreduce(self, *_: Any) -> Self:
        return self

    _allgather_base = _reduce_scatter_base = allreduce

    def wait(self) -> None: ...


class NoCopies:
    """In the place of a fake group: each collective is one call of that group, which copies
    nothing.
    """

    def __init__(self, group: Any) -> None:
        self.allreduce = group.allreduce

    def _allgather_base(self, _: Tensor, part: Tensor, *__: Any) -> Any:
        return self.allreduce([part])

    def _reduce_scatter_base(self, part: Tensor, _: Tensor, *__: Any) -> Any:
        return self.allreduce([part])


def _name(dp: int, sequence_parallel: bool) -> str:
    return f"dp {dp} × tp {TP}{', SP' if sequence_parallel else ''}"


def _microseconds(times: list[float]) -> str:
    return f"{median(times) * 1e6:.0f} µs"


def _totals(dp: int, sequence_parallel: bool, times: dict[str, list[float]]) -> tuple[str, ...]:
    cells = [_microseconds(times["plain"])]
    for kind in ("by hand", "emitted", "DTensor"):
        if kind in times:
            cells += [_microseconds(times[kind]), ratio(times[kind], times["plain"])]
        else:
            cells += ["", ""]
    return _name(dp, sequence_parallel), *cells


def _parts(dp: int, sequence_parallel: bool, times: dict[str, list[float]]) -> tuple[str, ...]:
    ladder = [
        times[kind]
        for kind in ("without communication", "without calls", "without copies", "emitted")
    ]
    added = [_microseconds([b - a for a, b in zip(*two, strict=True)]) for two in pairwise(ladder)]
    return (
        _name(dp, sequence_parallel),
        _microseconds(ladder[0]),
        *added,
        ratio(ladder[2], times["plain"]),
    )


if __name__ == "__main__":
    main()
