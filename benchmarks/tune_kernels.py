"""`.venv/bin/python benchmarks/tune_kernels.py [CLASS ...]`: the fastest tiles of kernels on this
GPU, into the table.

Every candidate of a class and size is timed in bfloat16, forward and backward together, by CUDA
events with a cold L2, after processes beside this one have compiled it;
`compiler/analysis/tiles.toml` gets the fastest under this chip's name, and keeps what it has of
other chips, classes and sizes.  Without a GPU it says so and exits with status 1.

Non-goals: no search beyond the lists below, no tiles at run time: a program brings those of its
plan's chip.
"""

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu import Machine, chip
from measure import table
from torch import Tensor

TABLE = Path(__file__).parent.parent / "compiler" / "analysis" / "tiles.toml"
HEAD = "# The tiles of kernels: by chip and class, and by the size of what a kernel works on.\n"
DEVICE = "cuda"
TOKENS = 8192
WINDOW = 1024
COMPILERS = 8
"""Processes, each with a candidate's tensors on the GPU."""
ROPE_SEQ, ROPE_HEADS, ROPE_KV_HEADS = 8192, 32, 8

Tiles = dict[str, dict[str, dict[str, Any]]]
"""Tiles of a chip: by class, and by size, the arguments of a tile."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """How a class is tuned.

    call: what is timed, of a size and a tile.  vary: what a tile may be replaced by, given the size
    and the best one so far, None at first; each is a round of its own.
    """

    sizes: Sequence[int]
    call: Callable[[Any, int, Any], Call]
    vary: Sequence[Callable[[Any, int, Any], Iterable[Any]]]


def main() -> None:
    """Tunes the classes named on the command line, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "classes", nargs="*", metavar="CLASS", help=f"of {', '.join(SUBJECTS)}; by default all"
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", metavar="N", help="of these classes; by default all"
    )
    options = parser.parse_args()
    names = options.classes or [*SUBJECTS]
    if unknown := set(names) - set(SUBJECTS):
        parser.error(f"no class of kernels that can be tuned: {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        sys.exit("error: tiles are measured on a GPU, and this machine has none")
    with ProcessPoolExecutor(COMPILERS, get_context("spawn")) as pool:
        for name in names:
            for size in options.sizes or SUBJECTS[name].sizes:
                tile, rows = tuned(pool, name, size)
                if rows[0][1] == float("inf"):
                    print(
                        f"{name}, {size}: no candidate runs, so the table keeps what it has",
                        file=sys.stderr,
                    )
                    continue
                table(
                    f"{name}, {size}",
                    ("tile", "ms"),
                    [(str(each), f"{ms:.4f}") for each, ms in rows[:5]],
                )
                known = tomllib.loads(TABLE.read_text()) if TABLE.exists() else {}
                for each in (name, *ALIKE.get(name, ())):
                    known.setdefault(chip(), {}).setdefault(each, {})[str(size)] = arguments(tile)
                TABLE.write_text(written(known))


def tuned(pool: Executor, name: str, size: int) -> tuple[Any, list[tuple[Any, float]]]:
    """The fastest tile, and all of the last round with their times in ms, fastest first."""
    from scalec.runtime import kernels  # needs triton

    subject, best, timed = SUBJECTS[name], None, list[tuple[Any, float]]()
    for vary in subject.vary:
        candidates = list(vary(kernels, size, best))
        list(pool.map(partial(_compile, name, size), candidates))
        timed = [(tile, _tried(_milliseconds, name, size, tile)) for tile in candidates]
        timed.sort(key=lambda pair: pair[1])
        best = timed[0][0]
    return best, timed


def _compile(name: str, size: int, tile: Any) -> None:
    """Leaves a candidate's kernels in Triton's cache."""
    _tried(_once, name, size, tile)
    torch.cuda.empty_cache()


def _once(call: Call) -> float:
    call()
    return 0.0


def _milliseconds(call: Call) -> float:
    return _machine().milliseconds(call)


def _machine() -> Machine:
    return Machine(torch.device(DEVICE), toy=False, repeats=20, warm=0.02)


def _tried(measure: Callable[[Call], float], name: str, size: int, tile: Any) -> float:
    """Seconds of a candidate's call; infinite where it fails, as where Triton cannot compile it."""
    from scalec.runtime import kernels

    try:
        return measure(SUBJECTS[name].call(kernels, size, tile))
    except Exception as error:  # of any kind: the other candidates are still to be timed
        print(f"{name}, {size}, {tile}: {_machine().failure(error)}", file=sys.stderr, flush=True)
        return float("inf")


def written(tables: Mapping[str, Tiles]) -> str:
    """The table as TOML, sorted: by chip, class and size."""
    parts = [HEAD]
    for chip_name, tiles in sorted(
        tables.items(), key=lambda pair: int(pair[0].removeprefix("sm_"))
    ):
        for name, by_size in sorted(tiles.items()):
            lines = [
                f"{size} = {_inline(tile)}\n"
                for size, tile in sorted(by_size.items(), key=lambda it: int(it[0]))
            ]
            parts.append(f"[{chip_name}.{name}]\n{''.join(lines)}")
    return "\n".join(parts)


def arguments(tile: Any) -> dict[str, Any]:
    """The arguments of a tile, without those at their defaults."""
    values = {field.name: (getattr(tile, field.name), field.default) for field in fields(tile)}
    return {
        name: arguments(value) if is_dataclass(value) else value
        for name, (value, default) in values.items()
        if value != default
    }


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_inline(each)}' for key, each in value.items())} }}"
    return str(value)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def _labels(classes: int) -> Tensor:
    return torch.randint(classes, (TOKENS,), device=DEVICE)


def _both(op: Callable[..., Any], operands: Sequence[Tensor], *rest: Any, **options: Any) -> Call:
    """Forward, and backward of all results that have one."""

    def call() -> object:
        made = op(*operands, *rest, **options)
        results = [it for it in (made if isinstance(made, tuple) else (made,)) if it.requires_grad]
        return torch.autograd.grad(results, operands, [torch.ones_like(it) for it in results])

    return call


def _norm(name: str, terms: int, kernels: Any, size: int, tile: Any) -> Call:
    x = [_randn(TOKENS, size) for _ in range(terms)]
    return _both(getattr(kernels, name)({size: tile}), [*x, _randn(size)], eps=1e-5)


def _rope(name: str, kernels: Any, size: int, tile: Any) -> Call:
    heads = (ROPE_HEADS, ROPE_KV_HEADS)[: 2 if name == "RopePair" else 1]
    angles = torch.randn(2, ROPE_SEQ, 1, 1, size, device=DEVICE, dtype=torch.bfloat16)
    return _both(
        getattr(kernels, name)({size: tile}),
        [_randn(ROPE_SEQ, 1, each, size) for each in heads],
        angles,
    )


def _gate(name: str, kernels: Any, size: int, tile: Any) -> Call:
    return _both(getattr(kernels, name)({size: tile}), [_randn(TOKENS, size) for _ in range(2)])


def _loss(name: str, kernels: Any, size: int, tile: Any) -> Call:
    return _both(getattr(kernels, name)({size: tile}), [_randn(TOKENS, size)], _labels(size))


def _attention(kernels: Any, size: int, blocks: Any) -> Call:
    """Calls for which torch has no kernel: with a window."""
    shapes = [(2, TOKENS // 2, heads, size) for heads in (ROPE_HEADS, ROPE_KV_HEADS, ROPE_KV_HEADS)]
    return _both(
        kernels.Attention({size: blocks}), [_randn(*shape) for shape in shapes], window=WINDOW
    )


def _adamw(kernels: Any, size: int, tile: Any) -> Call:
    from scalec.runtime.state.optimizers import ParamGroup, Part

    p, g, m, v = (torch.rand(1, size, device=DEVICE) for _ in range(4))
    part = Part(ParamGroup(weight_decay=0.1), p, g, {"exp_avg": m, "exp_avg_sq": v}, p.bfloat16())
    one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    return lambda: kernels.AdamW(tile=tile).update(part, 1e-9, one, zero, one)


def _choice(kernels: Any, size: int, tile: Any) -> Call:
    logits = torch.randn(TOKENS, size, device=DEVICE, requires_grad=True)
    return _both(kernels.TopK({size: tile}), [logits], min(8, size // 4), normalise=True)


def _balance(kernels: Any, size: int, tile: Any) -> Call:
    ids = torch.rand(2, TOKENS // 2, size, device=DEVICE).argsort(-1)[..., : min(8, size // 4)]
    logits = torch.randn(2, TOKENS // 2, size, device=DEVICE, requires_grad=True)
    return _both(kernels.Balance({size: tile}), [logits], ids, 0.01)


def _sorted(kernels: Any, size: int, tile: Any) -> Call:
    from scalec.runtime import Experts, Mesh

    ids = torch.rand(TOKENS, size, device=DEVICE).argsort(-1)[:, : min(8, size // 4)]
    return partial(kernels.SortByExpert({size: tile}), ids, Experts(Mesh({}, DEVICE), size))


def _order() -> Any:
    """Tokens that each choose 8 of 128 experts; made on the host, so that it has sizes where
    nothing is computed.
    """
    from scalec.runtime import Experts, Mesh, sort_by_expert

    order = sort_by_expert(torch.rand(TOKENS, 128).argsort(-1)[:, :8], Experts(Mesh({}), 128))
    assert order.total == 8 * TOKENS
    order.counts, order.choices, order.rows = (
        it.to(DEVICE) for it in (order.counts, order.choices, order.rows)
    )
    return order


def _routed(kernels: Any, size: int, tile: Any) -> Call:
    order, gates = _order(), torch.rand(TOKENS, 8, device=DEVICE, requires_grad=True)
    there, back = kernels.Dispatch({size: tile}), kernels.Combine({size: tile})
    return _both(
        lambda x, gates: back(there(x, order), gates, order), [_randn(TOKENS, size), gates]
    )


def _grouped(kernels: Any, size: int, blocks: Any) -> Call:
    """By our kernels where torch has some too."""
    from scalec.runtime.ops import grouped_linear

    order, weight = _order(), _randn(128, 768, size)
    call = _both(kernels.GroupedLinear({size: blocks}), [_randn(order.total, size), weight], order)

    def ours() -> object:
        with patch.object(grouped_linear, "is_for_grouped_mm", lambda *_: False):
            return call()

    return ours


WARPS = (1, 2, 4, 8, 16, 32)


def _rows(kernels: Any, size: int, best: Any) -> Iterable[Any]:
    """Whole rows, with 4 to 64 elements for each thread."""
    width = 1 << (size - 1).bit_length()
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for warps in WARPS:
            if 4 <= rows * width / (32 * warps) <= 64:
                yield kernels.Tile(rows=rows, warps=warps)


def _chunks(kernels: Any, size: int, best: Any) -> Iterable[Any]:
    """Choices that a program orders, each compared with all others, and experts for which one
    counts them.
    """
    for rows, columns, warps in product((32, 64, 128, 256, 512), (16, 32, 64, 128), (1, 2, 4, 8)):
        yield kernels.Tile(rows=rows, warps=warps, columns=columns)


def _programs(kernels: Any, size: int, best: Any) -> Iterable[Any]:
    """One to eight programs for each multiprocessor."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return [replace(best, programs=processors * each) for each in (1, 2, 4, 8)]


def _columns(kernels: Any, size: int, best: Any) -> Iterable[Any]:
    """Blocks of a row, with 4 to 32 elements for each thread."""
    for columns in (256, 512, 1024, 2048, 4096, 8192):
        for warps in WARPS:
            if 4 <= columns / (32 * warps) <= 32:
                yield kernels.Tile(rows=1, warps=warps, columns=columns)


BLOCKS = [
    (queries, keys, warps, stages)
    for queries in (32, 64, 128)
    for keys in (32, 64, 128)
    for warps in (4, 8)
    for stages in (1, 2, 3)
]

MOST = 160
"""Scores and sums that a thread may have."""


def _blocks(part: str, kernels: Any, size: int, best: Any) -> Iterable[Any]:
    """One kernel's blocks, the other two's as they are; at first all alike, for the forward kernel.

    None is fast whose scores and sums would take most of a thread's registers, and each compiles
    for a minute.
    """
    blocks = [
        kernels.Block(queries, keys, warps, stages)
        for queries, keys, warps, stages in BLOCKS
        if (max(queries, keys) * size + queries * keys) / (32 * warps) <= MOST
    ]
    return [
        replace(best, **{part: each}) if best else kernels.Blocks(each, blocks[0], blocks[0])
        for each in blocks
    ]


def _products(part: str, kernels: Any, size: int, best: Any) -> Iterable[Any]:
    """The blocks of rows or of weights, the others as they are; at first all alike."""
    sizes = product((64, 128), (64, 128, 256), (32, 64), (4, 8), (3, 4))
    found = [
        kernels.Product(rows, columns, terms, warps, stages)
        for rows, columns, terms, warps, stages in sizes
    ]
    return [
        replace(best, **{part: each}) if best else kernels.Products(each, found[0])
        for each in found
    ]


HIDDEN = (64, 128, 256, 1024, 2048, 4096, 8192, 16384)
FFN = (1024, 4096, 8192, 14336, 28672)
VOCABULARIES = (16032, 32064, 50304, 128256)
HEADS = (64, 128, 256)

SUBJECTS = {
    "RMSNorm": Subject(HIDDEN, partial(_norm, "RMSNorm", 1), [_rows, _programs]),
    "AddRMSNorm": Subject(HIDDEN, partial(_norm, "AddRMSNorm", 2), [_rows, _programs]),
    "LayerNorm": Subject(HIDDEN, partial(_norm, "LayerNorm", 1), [_rows, _programs]),
    "AddLayerNorm": Subject(HIDDEN, partial(_norm, "AddLayerNorm", 2), [_rows, _programs]),
    "Rope": Subject(HEADS, partial(_rope, "Rope"), [_rows]),
    "RopePair": Subject(HEADS, partial(_rope, "RopePair"), [_rows]),
    "SiluMul": Subject(FFN, partial(_gate, "SiluMul"), [_columns]),
    "GeluMul": Subject(FFN, partial(_gate, "GeluMul"), [_columns]),
    "CrossEntropy": Subject(VOCABULARIES, partial(_loss, "CrossEntropy"), [_columns]),
    "LogitSoftmaxStats": Subject(VOCABULARIES, partial(_loss, "LogitSoftmaxStats"), [_columns]),
    "TopK": Subject((8, 64, 128, 256), _choice, [_rows]),
    "Balance": Subject((8, 64, 128, 256), _balance, [_rows]),
    "SortByExpert": Subject((8, 64, 128, 256), _sorted, [_chunks]),
    "Combine": Subject(HIDDEN[2:], _routed, [_columns]),
    "GroupedLinear": Subject(
        (768, 2048, 4096), _grouped, [partial(_products, part) for part in ("of_rows", "of_weight")]
    ),
    "AdamW": Subject((1 << 28,), _adamw, [_columns]),
    "Attention": Subject(
        HEADS, _attention, [partial(_blocks, part) for part in ("forward", "keys", "queries")]
    ),
}
ALIKE = {
    "CrossEntropy": ["LinearCrossEntropy"],
    "LogitSoftmaxStats": ["LinearSoftmaxStats"],
    "Combine": ["Dispatch"],
    "Balance": ["RouterZ"],
}
"""Classes that start the same kernels on operands of the same size, or are timed together."""

if __name__ == "__main__":
    main()
