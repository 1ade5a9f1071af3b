"""The list of what `scalec calibrate` measures for some plans: calls as emitted programs make them,
groups of ranks.

A call is an expression over operands of a rank's shapes.  Its seconds, and those of each part of
its backward, become rows of hardware's tables (`analysis.hardware`).  An operand may be what
another call makes, or a layout of the first rank.  Non-goals: ops that communicate, and users' own.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

from attrs import evolve

from .. import __version__
from ..analysis.memory import account
from ..analysis.time.prices import ACCUMULATE, sums_of, work_of
from ..analysis.time.seconds import measured_as
from ..ir import BATCH, ITEM_BYTES, SEQUENCE, Op, Program, Type, walk
from ..ops import OPS, VJPS, messages
from ..ops.attention import ATTENTION
from ..ops.call import Layout
from ..ops.protocol import FUNCTIONAL
from ..ops.vjp import KIND as VJP
from ..ops.work import Product, Work
from ..reports.summary import launch
from .expressions import ATOM, WRITERS, Context, Expr, express
from .host_steps import host_steps
from .module import table_of
from .naming import layout as layout_text

Json = dict[str, Any]

PARTS = (1, 2, 4, 16, 64, 256)
"""The parts of a plan's batch, then of its sequence, at which its ops are measured."""

LONGER = (2, 4)
"""How many times a plan's sequence are those at which its attention is measured besides."""

INDICES = {"tokens", "labels"}
"""The operands of integers that any number below a size serves for."""

SORT = "sort_by_expert"
"""The op that makes the order of rows by expert, of which rows are taken and to which they are
added.
"""


def work_list(programs: Sequence[Program]) -> str:
    """The list of calls to measure for programs after the last pass, as JSON."""
    device = account(programs[0]).device
    calls = _different(it for program in programs for it in _calls(program))
    return json.dumps(
        {
            "written_by": f"scalec {__version__}",
            "device": device,
            "gpu": next((it.cluster.gpu for it in programs if it.cluster.gpu), device),
            "ranks": max(launch(it).nodes * launch(it).ranks_per_node for it in programs),
            "ranks_per_node": max(launch(it).ranks_per_node for it in programs),
            "calls": [
                *calls,
                *grid([it["row"] for it in calls if it["row"]["table"] == "product"]),
            ],
            "updates": _sizes(bucket for program in programs for bucket in _shards(program)),
            "steps": host_steps(programs) if device == "cuda" else [],
            "groups": _different(it for program in programs for it in _groups(program)),
        },
        indent=1,
    )


def _different(each: Iterable[Json]) -> list[Json]:
    return [*{json.dumps(it): it for it in each}.values()]


def _sizes(of: Iterable[int]) -> list[int]:
    """Sizes, and those between them and a small one, each four times the one before."""
    return sorted({size // 4**part for size in of for part in range(6) if size // 4**part >= 64})


# ---- calls


def _calls(program: Program) -> Iterator[Json]:
    """The calls of a program at its own shapes, and of parts of its batch and sequence; attention
    of longer ones too.

    Ranks that share a sequence attend to keys of all of it.
    """
    ranks = {
        dim: prod(program.axis(it.axis).size for it in program.claims if it.dim == dim)
        for dim in DATA
    }
    # whose ranks hold two pieces each
    ranks[SEQUENCE] *= 2 ** sum(dim == SEQUENCE for dim, _ in program.zigzags)
    for part in PARTS:
        rows = max(program.size(BATCH) // part, ranks[BATCH])
        length = max(program.size(SEQUENCE) * program.size(BATCH) // (rows * part), ranks[SEQUENCE])
        if rows % ranks[BATCH] == 0 and length % ranks[SEQUENCE] == 0:
            yield from _Calls(_resized(program, rows, length)).all()
    for times in LONGER:
        longer = _Calls(_resized(program, ranks[BATCH], program.size(SEQUENCE) * times))
        yield from (it for it in longer.all() if it["row"]["table"] == "attention")


def _resized(program: Program, batch: int, seq: int) -> Program:
    sizes = {BATCH: batch, SEQUENCE: seq}
    return evolve(
        program, dims=tuple(evolve(dim, size=sizes.get(dim.name, dim.size)) for dim in program.dims)
    )


DATA = (BATCH, SEQUENCE)


class _Calls:
    """The calls of a program at some sizes."""

    def __init__(self, program: Program) -> None:
        self._program, self._types = program, program.types
        self._vjps = dict[object, dict[tuple[str, ...], Op]]()
        self._made = {value.name: op for op in walk(program.region.body) for value in op.outputs}
        for op in walk(program.region.body):
            if op.kind == VJP:
                of = VJPS.pulled(op, self._of(op))
                self._vjps.setdefault(_key(of.op, of.types), {})[op.names("wrt")] = op

    def all(self) -> Iterator[Json]:
        """The calls of all ops; products are called by themselves, as those of two matrices
        that they are.
        """
        forward = {id(op) for op in walk(self._program.forward.body)}
        for op in walk(self._program.region.body):
            work = self._work(op)
            if work.products and not work.scores:
                yield from (
                    product_call(work.dtype, it) for it in work.products if id(op) in forward
                )
            elif (row := _row(op, work)) and self._is_listed(op):
                yield self._call(op, row)
            if sums := sums_of(self._program, op, self._of(op)):
                yield from (_sum(self._program, value.type) for value in op.outputs if sums)

    def _is_listed(self, op: Op) -> bool:
        entry, types = OPS[op.kind], self._of(op)
        numbers = {
            entry.operands[min(i, len(entry.operands) - 1)].name
            for i, (name, it) in enumerate(zip(op.inputs, types, strict=True))
            if it.dtype == "i64" and not self._order(name)
        }
        return (
            op.kind != "call"
            and bool(entry.function or op.kind in WRITERS)
            and (numbers <= INDICES or op.kind == SORT)
            and not messages(self._program, op, self._types)
        )

    def _call(self, op: Op, row: Json) -> Json:
        types, names = self._of(op), [f"x{i}" for i in range(len(op.inputs))]
        orders = [self._order(value) for value in op.inputs]
        inputs = {
            name: {"made": self._call(order, {})} if order else self._tensor(op, type)
            for name, type, order in zip(names, types, orders, strict=True)
        }
        written = express(op, [Expr(name, ATOM, ()) for name in names], self._context(inputs))
        made = self._vjps.get(_key(op, types), {}).values()
        back = (
            {"wrt": [*VJPS.pulled(it, self._of(it)).wrt], "row": _row(it, self._work(it))}
            for it in made
        )
        return {
            "call": written.text,
            "module": OPS[op.kind].module,
            "inputs": inputs,
            "row": row,
            "backward": [it for it in back if it["row"]],
        }

    def _context(self, inputs: dict[str, Json]) -> Context:
        """The surroundings of a call: groups of ranks and rotary tables are operands too."""

        def axis(axes: tuple[str, ...]) -> str:
            inputs["_".join(axes)] = {"ranks": self._program.degree(axes)}
            return "_".join(axes)

        def rotary(op: Op) -> str:
            table, type = table_of(op, self._types, self._program), self._types[op.inputs[0]]
            shape = (
                2,
                table.seq // self._program.degree(table.axes),
                *(1,) * (-2 - table.seq_dim),
                table.dim,
            )
            inputs["rotary"] = tensor(shape, type.dtype, warm=True)
            return "rotary"

        def layout(of: Layout) -> str:
            mesh = {axis.name: axis.size for axis in self._program.axes}
            inputs["layout"] = {"layout": layout_text(of, self._program, {}), "mesh": mesh}
            return "layout"

        return Context(
            self._program, self._types.__getitem__, axis, layout, rotary, lambda _: False, {}
        )

    def _tensor(self, op: Op, type: Type) -> Json:
        """An operand; integers are below the size of what they choose from."""
        first = self._types[op.inputs[0]]
        if op.kind == SORT:
            count = self._program.size(str(op.get("to")))
            return tensor(self._program.local_shape(type), type.dtype, count, warm=True) | {
                "even": True
            }
        chosen = (
            self._of(op)[1].dims[0]
            if first.dtype == "i64" and len(op.inputs) > 1
            else first.dims[-1]
        )
        below = self._program.size(chosen) if type.dtype == "i64" else 0
        return tensor(self._program.local_shape(type), type.dtype, below, warm=BATCH in type.dims)

    def _order(self, value: str) -> Op | None:
        """The op that makes a value, if it is an order of rows."""
        made = self._made.get(value)
        return made if made and made.kind == SORT else None

    def _of(self, op: Op) -> tuple[Type, ...]:
        return tuple(self._types[name] for name in op.inputs)

    def _work(self, op: Op) -> Work:
        return work_of(self._program, op, self._of(op)) or Work(kernels=0)


def _key(op: Op, types: Sequence[Type]) -> object:
    attrs = tuple((key, value) for key, value in op.attrs if key != "work")
    return op.kind, attrs, tuple((type.dtype, type.dims) for type in types)


def _row(op: Op, work: Work) -> Json | None:
    """The row of a table that an op's seconds become; None of one that computes next to nothing."""
    if it := work.scores:
        return {
            "table": "attention",
            "kernel": ATTENTION.name,
            "width": it.width,
            "length": it.length,
            "part": "backward" if it.backward else "forward",
            "operations": it.operations,
        }
    if work.bytes > 64:
        return {"table": "moved", "op": measured_as(op), "bytes": work.bytes}
    return None


# ---- the step


def _shards(program: Program) -> Iterator[int]:
    """The elements that each update of a rank is of."""
    for op in walk(program.region.body):
        if op.kind == "update":
            yield program.elements(program.operands(op)[0])


def _groups(program: Program) -> Iterator[Json]:
    """The groups of ranks that communicate in a program, all that do so at the same time
    together.
    """
    axes = {
        it.axes for op in walk(program.region.body) for it in messages(program, op, program.types)
    }
    if program.pipeline:
        axes |= {(program.pipeline.axis,)}
    for names in sorted(axes):
        if program.degree(names) > 1:
            yield {"axes": [*names], "groups": _peers(program, names)}


def _peers(program: Program, names: tuple[str, ...]) -> list[list[int]]:
    """The ranks of each group over some axes; ranks count the mesh's last axis innermost."""
    found = dict[tuple[int, ...], list[int]]()
    for rank in range(prod(axis.size for axis in program.axes)):
        left, place = rank, list[int]()
        for axis in reversed(program.axes):
            left, at = divmod(left, axis.size)
            place += [] if axis.name in names else [at]
        found.setdefault(tuple(place), []).append(rank)
    return [*found.values()]


def _sum(program: Program, type: Type) -> Json:
    """The sum of a gradient and those before it."""
    shape, wide = program.local_shape(type), "f64" if type.dtype == "f64" else "f32"
    size = prod(shape) * (ITEM_BYTES[type.dtype] + 2 * ITEM_BYTES[wide])
    return {
        "call": "x0.add_(x1)",
        "module": FUNCTIONAL,
        "inputs": {
            "x0": tensor(shape, wide, warm=False),
            "x1": tensor(shape, type.dtype, warm=True),
        },
        "row": {"table": "moved", "op": ACCUMULATE, "bytes": size},
        "backward": [],
    }


# ---- products: those of plans, and others between these

GRID = 20
"""How many products of other shapes than the plans' are measured, each with its two gradients:
60 shapes.
"""


def product_call(dtype: str, it: Product) -> Json:
    """A product as emitted programs make it, whose backward makes two others."""

    def factor(*shape: int, warm: bool) -> Json:
        return tensor(shape if it.batch == 1 else (it.batch, *shape), dtype, warm=warm)

    def row(m: int, n: int, k: int) -> Json:
        return {"table": "product", "dtype": dtype, "m": m, "n": n, "k": k, "batch": it.batch}

    weight = factor(it.n, it.k, warm=False) if it.batch == 1 else factor(it.k, it.n, warm=True)
    return {
        "call": "linear(x0, x1)" if it.batch == 1 else "x0 @ x1",
        "module": FUNCTIONAL,
        "inputs": {"x0": factor(it.m, it.k, warm=True), "x1": weight},
        "row": row(it.m, it.n, it.k),
        "backward": [
            {"wrt": [0], "row": row(it.m, it.k, it.n)},
            {"wrt": [1], "row": row(it.n, it.k, it.m)},
        ],
    }


def tensor(shape: Sequence[int], dtype: str, below: int = 0, *, warm: bool) -> Json:
    """An operand, of integers `below` a size; `warm` if it has just been made, and so may lie
    in a cache.
    """
    return {"shape": [*shape], "dtype": dtype, "below": below, "warm": warm}


def grid(products: Sequence[Json]) -> Iterator[Json]:
    """Products between the least and the largest of the plans': points of the sequence of
    Halton, in logarithms.
    """
    plain = [it for it in products if it["batch"] == 1]
    if not plain:
        return
    ends = [(min(it[key] for it in plain), max(it[key] for it in plain)) for key in "mnk"]
    for point in range(1, GRID + 1):
        sizes = (
            round(least * (most / least) ** _halton(point, base) / 8) * 8 or 8
            for (least, most), base in zip(ends, (2, 3, 5), strict=True)
        )
        yield product_call(plain[0]["dtype"], Product(*sizes))


def _halton(index: int, base: int) -> float:
    """A point in [0, 1) of van der Corput's sequence: the digits of its index, mirrored."""
    found, part = 0.0, 1.0
    while index:
        part /= base
        index, digit = divmod(index, base)
        found += part * digit
    return found
