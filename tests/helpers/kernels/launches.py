"""Every kernel that the programs of plans start, as they start it, without a GPU.

A plan's program runs a step on the meta device, where everything has its shape, element type and
strides; what it starts is listed.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from helpers.kernels.compiled import Launch, recorded
from helpers.kernels.programs import compiled, emitted, pretended, step
from scalec.compiler.analysis.kernel_tiles import kernels_of
from scalec.compiler.syntax.limits import load
from scalec.runtime.comm.experts import ExpertRows
from scalec.runtime.kernels import Attention, RingAttention

PLANS = sorted((Path(__file__).parents[3] / "plans").glob("*.scale"))
GPUS = {80: "a100_80gb", 90: "h100_sxm", 100: "b200"}


def launches(path: Path, gpu: str) -> Iterator[Launch]:
    """The launches of each rank of a plan that has other stages than the rest."""
    source = load(path)
    program = compiled(source, gpu)
    ranks = program.degree(tuple(axis.name for axis in program.axes))
    for rank in (0, ranks - 1) if program.pipeline else (0,):
        module = emitted(program, source)
        with pretended(ranks, rank), recorded() as started:
            for used in kernels_of(program):
                _watch(module, used.function, started)
            step(module, "meta")
        yield from started


def distinct(gpu: str, plans: Iterable[Path] = PLANS) -> list[Launch]:
    """One launch for each configuration of a kernel, of some plans: that of the largest
    operands.
    """
    found: dict[str, Launch] = {}
    for launch in chain.from_iterable(launches(path, gpu) for path in plans):
        found[str(launch)] = max(found.get(str(launch), launch), launch, key=lambda it: it.bytes)
    return [*found.values()]


def _watch(module: ModuleType, function: str, started: list[Launch]) -> None:
    """Has a function of kernels fail where it starts none; attention may be torch's, and rows
    be in order.
    """
    op: Any = getattr(module, function)

    def watched(*operands: Any, **options: Any) -> Any:
        before = len(started)
        result = op(*operands, **options)
        in_order = any(
            isinstance(it, ExpertRows) and it.arranged is None for it in (*operands, result)
        )
        later = "async_op" in options  # `wait` puts in order what has come
        known = isinstance(op, Attention | RingAttention) or in_order or later
        assert len(started) > before or known, f"{op} starts no kernel"
        return result

    setattr(module, function, watched)
