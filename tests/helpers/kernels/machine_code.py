"""The machine code of kernels that are bound by memory, read where there is no GPU to time it.

    PYTHONPATH=tests python -m helpers.kernels.machine_code     # a table of all that the
        programs of plans/ start

Three things that keep a kernel below the rate of a copy can be read from code: accesses of less
than 16 bytes a thread, or to places far from each other; fewer bytes asked for at a time than
memory delivers within its latency; operands read more than once, which `traffic` counts.  None of
it is measured, and what passes may still be slow.

Non-goals: kernels with products of matrices, whose bound is another.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod

from helpers.kernels.compiled import Compiled, Launch, compile_for
from helpers.kernels.launches import GPUS, distinct

PRODUCTS = {
    "forward_kernel",
    "keys_kernel",
    "queries_kernel",
    "group_rows_kernel",
    "group_weight_kernel",
}
"""The kernels that multiply matrices."""

COMPARES = {"top_k_forward", "top_k_backward", "router_sums_kernel"}
"""The kernels that go over what they have read as often as experts are chosen."""

LATENCY = 1000
"""Cycles from a load to its data while memory is busy: an assumption, twice what one load alone
takes.

That is 466 on an A100 and 479 on an H100 (arXiv:2402.13499, table of memory latencies).
"""

LARGE = 4 << 20
"""Bytes from which on a launch is bound by memory; smaller ones are by their start."""

_WIDE = 16
_SEGMENT = 64
"""Two sectors, in which memory answers."""

_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i64": 64, "i32": 32, "i1": 8, "i8": 8}


@dataclass(frozen=True)
class Chip:
    """From NVIDIA's data sheets: bytes a second, multiprocessors, boost clock in Hz, bytes of
    shared memory of each.
    """

    bandwidth: float
    processors: int
    clock: float
    shared: int

    @property
    def demand(self) -> float:
        """Bytes that each multiprocessor must have asked for at any time, for all of the
        bandwidth (Little's law).
        """
        return self.bandwidth * LATENCY / self.clock / self.processors


CHIPS: Mapping[int, Chip] = {
    80: Chip(2.039e12, 108, 1.41e9, 164 << 10),  # A100 80GB SXM
    90: Chip(3.35e12, 132, 1.98e9, 228 << 10),  # H100 SXM
    100: Chip(8e12, 148, 1.965e9, 228 << 10),  # B200
}


@dataclass(frozen=True)
class Reading:
    """The figures read from the code of one launch on one chip.

    wide      share of bytes of loads and stores that go 16 at a time
    segment   bytes that lie together among those of a warp's access, at least
    programs  how many a multiprocessor has at once
    flying    bytes that they ask for before they need one, per multiprocessor, without lanes beside
              the row
    demand    what Little's law wants of that
    """

    wide: float
    segment: int
    programs: int
    flying: float
    demand: float


def read(launch: Launch, code: Compiled, chip: Chip) -> Reading:
    """Reads the code of a launch."""
    threads = 32 * launch.options["num_warps"]
    accesses = [*_accesses(code.layouts)]
    wide = _WIDE * threads * len([*_global(code.ptx, "ld|st", _WIDE)])
    programs = resident(code, launch.options["num_warps"], chip)
    return Reading(
        min(1.0, wide / sum(bytes for bytes, _ in accesses)),
        # not of numbers for each row
        min(segment for bytes, segment in accesses if 4 * bytes >= max(accesses)[0]),
        programs,
        _asked(code.ptx) * threads * programs * _useful(launch.constants),
        chip.demand,
    )


def is_bound(launch: Launch) -> bool:
    """Whether memory is what bounds it."""
    return launch.kernel.__name__ not in PRODUCTS | COMPARES and launch.bytes >= LARGE


def is_aligned(launch: Launch) -> bool:
    """Whether rows of logits begin at multiples of 16 bytes: those of 6300 classes, GPT-J's on
    a rank, do not.
    """
    rows = launch.args[0]
    return (
        not launch.kernel.__name__.startswith("logit_") or rows.stride(0) * rows.itemsize % 16 == 0
    )


def check_flow(launch: Launch, code: Compiled, capability: int) -> None:
    """Raises where a launch has narrow or scattered accesses, asks for too little at a time, or
    waits for a place.
    """
    chip = CHIPS[capability]
    found = read(launch, code, chip)
    assert found.wide >= 0.9, f"{launch}: {found}"
    assert found.segment >= _SEGMENT, f"{launch}: {found}"
    assert found.flying >= found.demand, f"{launch}: {found}"
    # a norm's, of which each program takes rows in turn
    if launch.kernel.__name__ == "norm_backward":
        assert launch.grid[0] <= found.programs * chip.processors, f"{launch}: {found}"


def resident(code: Compiled, warps: int, chip: Chip) -> int:
    """Programs that a multiprocessor has at once, with 64 warps, 65536 registers by 256, 1 KiB
    of its own for each.
    """
    registers = ceil(code.registers * 32 / 256) * 256 * warps
    return min(64 // warps, 32, 65536 // registers, chip.shared // (code.shared + 1024))


def _accesses(layouts: str) -> Iterator[tuple[int, int]]:
    """The bytes of each load and store of a tensor, and how many of a warp's lie together."""
    known = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*?)\}>", layouts, re.MULTILINE))
    for shape, element, layout in re.findall(
        r"tt\.(?:load|store) .*: tensor<([\dx]+)x!tt\.ptr<(\w+)>, (#\w+)>", layouts
    ):
        fields = {
            name: [int(each) for each in row.split(",")]
            for name, row in re.findall(r"(\w+) = \[(.*?)\]", known[layout])
        }
        sizes, size, together = [int(each) for each in shape.split("x")], _BITS[element] // 8, 1
        for dim in fields["order"]:
            together *= min(
                fields["sizePerThread"][dim] * fields["threadsPerWarp"][dim], sizes[dim]
            )
            if fields["sizePerThread"][dim] < sizes[dim]:
                break  # a row that one thread has goes on in the next, as parts of 16 bytes do
        yield prod(sizes) * size, together * size


def _global(ptx: str, kinds: str, least: int) -> Iterator[int]:
    """The bytes a thread of each access to global memory that has so many at least."""
    for vector, bits in re.findall(rf"\b(?:{kinds})\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s", ptx):
        if (bytes := int(vector or 1) * int(bits) // 8) >= least:
            yield bytes


def _asked(ptx: str) -> int:
    """The most bytes that a thread loads in a row of instructions without a label or a barrier."""
    return max(
        sum(_global(part, "ld", _WIDE))
        for part in re.split(r"^\$L\w+:|bar\.sync", ptx, flags=re.MULTILINE)
    )


def _useful(constants: Mapping[str, int]) -> float:
    """The share of lanes that have elements: rows are padded to powers of two."""
    for size, width in (("WIDTH", "COLUMNS"), ("D", "DP")):
        if size in constants and width in constants:
            return constants[size] / (ceil(constants[size] / constants[width]) * constants[width])
    return constants["TURNED"] / 2 / constants["HALF"] if "HALF" in constants else 1.0


def _rows() -> Iterator[tuple[str, ...]]:
    """Each kernel's worst figures on each chip, of all its launches."""
    for capability, gpu in GPUS.items():
        readings: dict[str, list[Reading]] = {}
        for launch in distinct(gpu):
            if is_bound(launch):
                reading = read(launch, compile_for(launch, capability), CHIPS[capability])
                readings.setdefault(launch.name, []).append(reading)
        for name, all in sorted(readings.items()):
            yield (
                name,
                f"sm_{capability}",
                f"{min(it.wide for it in all):.0%}",
                f"{min(it.segment for it in all)}",
                f"{min(it.programs for it in all)}–{max(it.programs for it in all)}",
                f"{min(it.flying for it in all) / 1024:.0f}",
                f"{all[0].demand / 1024:.0f}",
            )


if __name__ == "__main__":
    print(
        "| kernel | chip | 16 bytes wide | bytes together | programs | KiB asked for | KiB needed |"
    )
    print("| - | - | - | - | - | - | - |")
    for row in _rows():
        print(f"| {' | '.join(row)} |", flush=True)
