"""`.venv/bin/python benchmarks/time_of_plans.py [--json FILE]`: steps of plans, predicted and then
measured.

One rank of a mesh on one thread of the CPU, whose groups are the simulated link of `overlap.py`.
The machine is measured first (`scalec calibrate`) at the shapes of other plans; then each plan's
step is predicted; then all run, in turns.  Nothing is fitted.  Bar: median error within 5%, largest
within 10%; of two gloo ranks (`--ranks`), none.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from emitted import MODELS, Sizes, batch, loaded, random_rows
from measure import in_turns, table, where
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from scalec.compiler.analysis.hardware import Collective, Hardware, load
from scalec.compiler.analysis.time.clocks import StepTime
from scalec.compiler.analysis.time.step import step_time
from scalec.compiler.syntax.limits import load as source
from scalec.compiler.tuning.lowering import compile_plan
from scalec.runtime import Batch, Mesh
from scalec.runtime.comm.mesh import Axis
from scalec.tools.calibrate.work_list import work_list

KEPT = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""Has the C library keep freed memory, as torch does on a GPU: pages are not cleared once more
in each step.
"""
LATENCY, BANDWIDTH = 1e-3, 2e9
OPS = {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}
"""The trips of each collective around its ring."""


@dataclass(frozen=True)
class Case:
    """A plan: a Llama of some sizes, a mesh, and what else it says."""

    sizes: Sizes
    mesh: Mapping[str, int]
    state: str = ""
    train: str = ""
    shard: str = "batch over dp  vocab, heads, kv_heads, ffn over tp"

    def text(self) -> str:
        """The plan."""
        of, rules = self.sizes, self.shard if {"dp", "tp"} <= {*self.mesh} else ""
        names = ("vocab", "hidden", "heads", "kv_heads", "head_dim", "ffn", "layers")
        dims = "  ".join(f"{name} = {getattr(of, name)}" for name in names)
        axes = "  ".join(f"{axis} = {size}" for axis, size in self.mesh.items())
        rows = of.rows * of.microbatches * self.mesh.get("dp", 1)
        rules = "  ".join(
            rule
            for rule in self.shard.split("  ")
            if rule.split(" over ")[1].split()[0] in self.mesh
        )
        return f"""use "models/llama.scale" {{ dims {{ {dims} }} }}
{f"mesh {{ {axes} }} shard {{ {rules} }}" if self.mesh else ""}
state {{ {self.state} }}
train {{
  seq = {of.seq}  global_batch = {rows}  microbatch = {of.rows}  steps = 100  seed = 0
  precision = fp32  {self.train}
  optimizer adamw {{ lr = 1e-3  clip = 1.0  weight_decay = 0.1 }}
  data text {{ files = [python_stdlib]  tokenizer = bytes }}
}}
"""


def sizes(
    hidden: int,
    layers: int,
    seq: int,
    rows: int,
    microbatches: int = 1,
    ffn: int = 0,
    head: int = 32,
) -> Sizes:
    heads = hidden // head
    return Sizes(
        vocab=1024, hidden=hidden, heads=heads, kv_heads=heads // 2, head_dim=head,
        ffn=ffn or 3 * hidden, layers=layers, seq=seq, rows=rows, microbatches=microbatches,
    )  # fmt: skip


MEASURED = {
    "a": Case(sizes(192, 2, 128, 4), {}),
    "b": Case(sizes(512, 2, 256, 4), {}),
    "c": Case(sizes(384, 2, 512, 2, head=64), {}),
    "d": Case(sizes(640, 2, 192, 2), {"tp": 2}),
}
"""The plans at whose shapes the machine is measured: none of those that are predicted."""

PREDICTED = {
    "hidden 256": Case(sizes(256, 4, 256, 2), {}),
    "hidden 448": Case(sizes(448, 3, 192, 4), {}),
    "4 microbatches": Case(sizes(256, 4, 192, 2, 4), {}),
    "zero 0": Case(sizes(256, 6, 128, 4), {"dp": 8}, "zero 0 over dp  bucket = 4MiB"),
    "zero 1": Case(sizes(256, 6, 128, 4), {"dp": 8}, "zero 1 over dp  bucket = 4MiB"),
    "zero 2, 2 microbatches": Case(sizes(256, 6, 128, 4, 2), {"dp": 8}, "zero 2 over dp"),
    "zero 3": Case(sizes(320, 6, 128, 4), {"dp": 8}, "zero 3 over dp"),
    "zero 3, prefetch 0": Case(sizes(256, 6, 256, 2), {"dp": 8}, "zero 3 over dp  prefetch = 0"),
    "tp 2": Case(sizes(512, 3, 192, 4), {"tp": 2}),
    "tp 4, dp 2": Case(sizes(512, 3, 256, 4), {"dp": 2, "tp": 4}, "zero 1 over dp"),
    "sequence parallel": Case(
        sizes(512, 3, 256, 4), {"tp": 4}, shard="vocab, heads, kv_heads, ffn over tp  seq over tp"
    ),
    "recompute full": Case(sizes(256, 4, 256, 3), {}, train="recompute = full"),
    "ring": Case(sizes(256, 4, 1024, 1), {"cp": 4}, shard="seq over cp as zigzag via ring"),
    "gather": Case(sizes(256, 4, 1024, 1), {"cp": 4}, shard="seq over cp as zigzag via gather"),
}


class Link:
    """In the place of a process group: it does one collective after another, while the rank
    computes.

    Peers are absent, and their parts are copies of this rank's own; the time of making these is not
    counted.
    """

    def __init__(self, ranks: int, clock: "Clock") -> None:
        self._ranks, self._clock = ranks, clock
        self._free = 0.0

    def rank(self) -> int:
        return 0

    def _allgather_base(self, whole: Tensor, part: Tensor, *_: Any) -> "Work":
        with self._clock.stopped():
            whole.view(self._ranks, -1).copy_(part.reshape(1, -1).clone())
        return self._begin("all_gather", whole.nbytes)

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, *_: Any) -> "Work":
        with self._clock.stopped():
            if part.data_ptr() != whole.data_ptr():
                part.view(-1).copy_(whole.view(-1)[: part.numel()])
        return self._begin("reduce_scatter", whole.nbytes)

    def alltoall_base(
        self, out: Tensor, whole: Tensor, of: Sequence[int], to: Sequence[int], *_: Any
    ) -> "Work":
        with self._clock.stopped():
            out.view(-1).copy_(whole.reshape(-1))
        return self._begin("rotate" if to else "all_to_all", whole.nbytes)

    def allreduce(self, tensors: list[Tensor], *_: Any) -> "Work":
        return self._begin("all_reduce", tensors[0].nbytes)

    def _begin(self, op: str, size: int) -> "Work":
        self._free = max(self._clock.now(), self._free) + seconds(op, self._ranks, size)
        return Work(self._free, self._clock)


def seconds(op: str, ranks: int, size: int) -> float:
    """The seconds of a collective by its bytes in all."""
    if op == "rotate":
        return LATENCY + size / BANDWIDTH
    return OPS[op] * (LATENCY + size * (ranks - 1) / ranks / BANDWIDTH)


class Clock:
    """A clock that can be stopped."""

    def __init__(self) -> None:
        self._lost = 0.0

    def now(self) -> float:
        return perf_counter() - self._lost

    @contextmanager
    def stopped(self) -> Generator[None]:
        start = perf_counter()
        yield
        self._lost += perf_counter() - start


@dataclass
class Work:
    """A collective under way, done at a time that is known."""

    end: float
    clock: Clock

    def wait(self) -> None:
        while self.clock.now() < self.end:
            pass


class LinkedMesh(Mesh):
    """A mesh each of whose groups communicates over a link of its own."""

    def __init__(self, axes: Mapping[str, int], clock: Clock) -> None:
        super().__init__(axes)
        self._clock, self._links = clock, dict[str, Link]()

    def axis(self, *names: str) -> Axis:
        axis = super().axis(*names)
        if axis.size == 1:
            return axis
        link = self._links.setdefault(axis.name, Link(axis.size, self._clock))
        return replace(axis, group=link)


def main() -> None:
    if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--figures", type=Path, metavar="FILE", help="of an earlier calibration")
    parser.add_argument("--only", default="", metavar="WORD", help="plans with this in their names")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", action="store_true", help="besides, plans on two gloo ranks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "models").symlink_to(MODELS.resolve())
        on = _linked(load(given.figures or calibrated(folder)))
        paths = {
            name: write(folder, name, case)
            for name, case in PREDICTED.items()
            if given.only in name
        }
        predicted = {
            name: step_time(compile_plan(source(path)), on) for name, path in paths.items()
        }
        took = in_turns(
            {name: _step(folder, PREDICTED[name], path) for name, path in paths.items()},
            given.rounds,
        )
    rows = [(name, *row_of(predicted[name], took[name])) for name in paths]
    print(where())
    table("One rank, one thread", ("plan", "predicted", "measured", "error"), rows)
    errors = {name: predicted[name].seconds / median(took[name]) - 1 for name in paths}
    print(
        f"\nmedian {median(map(abs, errors.values())):.1%}, largest"
        f" {max(map(abs, errors.values())):.1%}"
    )
    if given.json:
        each = {
            name: {
                "predicted": predicted[name].seconds,
                "measured": took[name],
                "kinds": predicted[name].kinds,
            }
            for name in paths
        }
        given.json.write_text(json.dumps(each, indent=1))
    if given.ranks:
        from time_on_ranks import on_ranks

        on_ranks(given.rounds)


def row_of(it: StepTime, took: list[float]) -> tuple[str, ...]:
    middle = median(took)
    return f"{it.seconds * 1e3:.1f} ms", f"{middle * 1e3:.1f} ms", f"{it.seconds / middle - 1:+.1%}"


def _linked(it: Hardware) -> Hardware:
    """The measured machine, with the simulated link."""
    rows = [
        Collective(op, ranks, ranks, size, seconds(op, ranks, size))
        for op in OPS
        for ranks in (2, 4, 8)
        for size in (1, 1 << 30)
    ]
    measured = evolve(it.measured, collectives=tuple(rows))
    return evolve(
        it, network=BANDWIDTH, network_latency=LATENCY, measured=measured, ranks_per_node=1
    )


def write(folder: Path, name: str, case: Case) -> Path:
    path = folder / f"{name.replace(' ', '_').replace(',', '')}.scale"
    path.write_text(case.text())
    return path


def calibrated(folder: Path, cases: Mapping[str, Case] = MEASURED, *launch: str) -> Path:
    plans = [write(folder, name, case) for name, case in cases.items()]
    figures, listed = folder / "machine.toml", folder / "machine.json"
    listed.write_text(work_list([compile_plan(source(path)) for path in plans]))
    command = [
        sys.executable,
        "-m",
        *launch,
        "scalec.tools.calibrate",
        listed,
        "-o",
        figures,
        "--most",
        str(1 << 24),
    ]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return figures


@contextmanager
def _fake_ranks(case: Case) -> Generator[None]:
    """A group that does nothing, of the ranks of a plan."""
    ranks = prod(case.mesh.values())
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    yield
    if ranks > 1:
        dist.destroy_process_group()


def _step(folder: Path, case: Case, path: Path) -> Callable[[], float]:
    """A step of a plan on its links, right after another of its own, as in a run: its seconds."""
    emitted, clock = loaded(folder, path), Clock()
    with _fake_ranks(case):
        model, state = emitted.build(LinkedMesh(case.mesh, clock))
    state.initialise(0)
    own = _local(batch(emitted, *random_rows(case.sizes, seed=0)), emitted, case)

    def run() -> float:
        with _fake_ranks(case):
            emitted.train_step(model, state, own, 1e-3)
            start = clock.now()
            emitted.train_step(model, state, own, 1e-3)
            return clock.now() - start

    return run


def _local(it: Batch, emitted: Any, case: Case) -> Batch:
    """A rank's part of a sequence that is sharded."""
    dim = 1 + emitted.PLAN.inputs["tokens"].dims.index("seq")
    length = case.sizes.seq // case.mesh.get("cp", 1)
    return Batch(*(each.narrow(dim, 0, length).contiguous() for each in (it.tokens, it.labels)))


if __name__ == "__main__":
    main()
