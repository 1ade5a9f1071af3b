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

from ...compiler import __version__
from ...compiler.analysis.memory import account
from ...compiler.analysis.time.prices import ACCUMULATE, sums_of, work_of
from ...compiler.analysis.time.seconds import get_measured_name
from ...compiler.emit.expressions import ATOM, WRITERS, Context, Expr, express
from ...compiler.emit.module import table_of
from ...compiler.emit.naming import layout as layout_text
from ...compiler.ir import BATCH, ITEM_BYTES, SEQUENCE, Op, Program, Type, walk
from ...compiler.ops import OPS, VJPS, messages
from ...compiler.ops.attention import ATTENTION
from ...compiler.ops.call import Layout
from ...compiler.ops.protocol import FUNCTIONAL
from ...compiler.ops.vjp import KIND as VJP
from ...compiler.ops.work import Product, Work
from ...compiler.reports.summary import get_launch
from .host_steps import host_steps

Json = dict[str, Any]

PARTS = (1, 2, 4, 16, 64, 256)
"""The parts of a plan's batch, then of its sequence, at which its ops are measured."""

LONGER = (2, 4)
"""The factors of the longer sequences at which a plan's attention is measured besides."""

INDICES = {"tokens", "labels"}
"""The operands of integers for which any number below a size serves."""

SORT = "sort_by_expert"
"""The op that makes the order of rows by expert.  Other ops take rows in this order, or add to
them.
"""


def work_list(programs: Sequence[Program]) -> str:
    """The list of calls to measure for programs after the last pass, as JSON."""
    device = account(programs[0]).device
    calls, updates, groups = list[Json](), set[int](), list[Json]()
    for program in programs:
        calls += _calls(program)
        updates |= {*_shards(program)}
        groups += _groups(program)
    calls = _different(calls)
    products = [call["row"] for call in calls if call["row"]["table"] == "product"]
    gpus = [program.cluster.gpu for program in programs if program.cluster.gpu]
    jobs = [get_launch(program) for program in programs]
    content = {
        "written_by": f"scalec {__version__}",
        "device": device,
        "gpu": gpus[0] if gpus else device,
        "ranks": max(job.nodes * job.ranks_per_node for job in jobs),
        "ranks_per_node": max(job.ranks_per_node for job in jobs),
        "calls": [*calls, *grid(products)],
        "updates": _sizes(updates),
        "steps": host_steps(programs) if device == "cuda" else [],
        "groups": _different(groups),
    }
    return json.dumps(content, indent=1)


def _different(entries: Iterable[Json]) -> list[Json]:
    return [*{json.dumps(entry): entry for entry in entries}.values()]


def _sizes(updates: Iterable[int]) -> list[int]:
    """Sizes, and smaller ones down to 64, each a quarter of the one before it."""
    sizes = set[int]()
    for update in updates:
        sizes |= {update // 4**power for power in range(6)}
    return sorted(size for size in sizes if size >= 64)


# ---- calls


def _calls(program: Program) -> Iterator[Json]:
    """The calls of a program at its own shapes, and of parts of its batch and sequence; attention
    of longer ones too.

    Ranks that share a sequence attend to keys of all of it.
    """
    ranks = dict[str, int]()
    for dim in DATA:
        sizes = [program.axis(claim.axis).size for claim in program.claims if claim.dim == dim]
        ranks[dim] = prod(sizes)
    # in zigzag order each rank has two pieces of the sequence
    ranks[SEQUENCE] *= 2 ** sum(dim == SEQUENCE for dim, _ in program.zigzags)
    for part in PARTS:
        rows = max(program.size(BATCH) // part, ranks[BATCH])
        length = max(program.size(SEQUENCE) * program.size(BATCH) // (rows * part), ranks[SEQUENCE])
        if rows % ranks[BATCH] == 0 and length % ranks[SEQUENCE] == 0:
            yield from _Calls(_resize(program, rows, length)).all()
    for times in LONGER:
        longer = _Calls(_resize(program, ranks[BATCH], program.size(SEQUENCE) * times))
        yield from (call for call in longer.all() if call["row"]["table"] == "attention")


def _resize(program: Program, batch: int, seq: int) -> Program:
    sizes = {BATCH: batch, SEQUENCE: seq}
    dims = [evolve(dim, size=sizes.get(dim.name, dim.size)) for dim in program.dims]
    return evolve(program, dims=tuple(dims))


DATA = (BATCH, SEQUENCE)


class _Calls:
    """The calls of a program at some sizes."""

    def __init__(self, program: Program) -> None:
        self._program, self._types = program, program.types
        self._vjps = dict[object, dict[tuple[str, ...], Op]]()
        self._makers = dict[str, Op]()
        for op in walk(program.region.body):
            self._makers |= {value.name: op for value in op.outputs}
        for op in walk(program.region.body):
            if op.kind == VJP:
                pulled = VJPS.take_apart(op, self._of(op))
                self._vjps.setdefault(_key(pulled.op, pulled.types), {})[op.names("wrt")] = op

    def all(self) -> Iterator[Json]:
        """The calls of all ops; products are called by themselves, as the products of two matrices
        that they are.
        """
        forward = {id(op) for op in walk(self._program.forward.body)}
        for op in walk(self._program.region.body):
            work = self._work(op)
            if work.products and not work.scores:
                if id(op) in forward:  # the backward of these calls is measured with them
                    yield from (product_call(work.dtype, product) for product in work.products)
            elif (row := _row(op, work)) and self._is_listed(op):
                yield self._call(op, row)
            if sums_of(self._program, op, self._of(op)):
                yield from (_sum(self._program, value.type) for value in op.outputs)

    def _is_listed(self, op: Op) -> bool:
        entry = OPS[op.kind]
        numbers = set[str]()  # the operands that are integers
        for i, (name, type) in enumerate(zip(op.inputs, self._of(op), strict=True)):
            if type.dtype == "i64" and not self._order(name):
                numbers.add(entry.operands[min(i, len(entry.operands) - 1)].name)
        return (
            op.kind != "call"
            and bool(entry.function or op.kind in WRITERS)
            and (numbers <= INDICES or op.kind == SORT)
            and not messages(self._program, op, self._types)
        )

    def _call(self, op: Op, row: Json) -> Json:
        types, inputs = self._of(op), dict[str, Json]()
        for i, (value, type) in enumerate(zip(op.inputs, types, strict=True)):
            if order := self._order(value):
                inputs[f"x{i}"] = {"made": self._call(order, {})}
            else:
                inputs[f"x{i}"] = self._tensor(op, type)
        operands = [Expr(name, ATOM, ()) for name in inputs]
        expr = express(op, operands, self._context(inputs))
        backward = list[Json]()
        for vjp in self._vjps.get(_key(op, types), {}).values():
            if vjp_row := _row(vjp, self._work(vjp)):
                wrt = VJPS.take_apart(vjp, self._of(vjp)).wrt
                backward.append({"wrt": [*wrt], "row": vjp_row})
        return {
            "call": expr.text,
            "module": OPS[op.kind].module,
            "inputs": inputs,
            "row": row,
            "backward": backward,
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
        shape = self._program.local_shape(type)
        if op.kind == SORT:
            count = self._program.size(str(op.get("to")))
            return tensor(shape, type.dtype, count, warm=True) | {"even": True}
        below = 0
        if type.dtype == "i64":
            is_index = first.dtype == "i64" and len(op.inputs) > 1
            chosen = self._of(op)[1].dims[0] if is_index else first.dims[-1]
            below = self._program.size(chosen)
        return tensor(shape, type.dtype, below, warm=BATCH in type.dims)

    def _order(self, value: str) -> Op | None:
        """The op that makes a value, if it is an order of rows."""
        maker = self._makers.get(value)
        return maker if maker and maker.kind == SORT else None

    def _of(self, op: Op) -> tuple[Type, ...]:
        return tuple(self._types[name] for name in op.inputs)

    def _work(self, op: Op) -> Work:
        return work_of(self._program, op, self._of(op)) or Work(kernels=0)


def _key(op: Op, types: Sequence[Type]) -> object:
    attrs = tuple((key, value) for key, value in op.attrs if key != "work")
    return op.kind, attrs, tuple((type.dtype, type.dims) for type in types)


def _row(op: Op, work: Work) -> Json | None:
    """The row of a table that an op's seconds become; None if it computes next to nothing."""
    if scores := work.scores:
        return {
            "table": "attention",
            "kernel": ATTENTION.name,
            "width": scores.width,
            "length": scores.length,
            "part": "backward" if scores.backward else "forward",
            "operations": scores.operations,
        }
    if work.bytes > 64:
        return {"table": "moved", "op": get_measured_name(op), "bytes": work.bytes}
    return None


# ---- the step


def _shards(program: Program) -> Iterator[int]:
    """The number of elements of each update of a rank."""
    for op in walk(program.region.body):
        if op.kind == "update":
            yield program.elements(program.operands(op)[0])


def _groups(program: Program) -> Iterator[Json]:
    """The groups of ranks that communicate in a program; groups over the same axes communicate
    at the same time.
    """
    axes = set[tuple[str, ...]]()
    for op in walk(program.region.body):
        axes |= {message.axes for message in messages(program, op, program.types)}
    if program.pipeline:
        axes |= {(program.pipeline.axis,)}
    for names in sorted(axes):
        if program.degree(names) > 1:
            yield {"axes": [*names], "groups": _peers(program, names)}


def _peers(program: Program, names: tuple[str, ...]) -> list[list[int]]:
    """The ranks of each group over some axes; ranks count the mesh's last axis innermost."""
    groups = dict[tuple[int, ...], list[int]]()  # by the place on the other axes
    for rank in range(prod(axis.size for axis in program.axes)):
        outer, place = rank, list[int]()
        for axis in reversed(program.axes):
            outer, coordinate = divmod(outer, axis.size)
            if axis.name not in names:
                place.append(coordinate)
        groups.setdefault(tuple(place), []).append(rank)
    return [*groups.values()]


def _sum(program: Program, type: Type) -> Json:
    """The sum of a gradient and the gradients before it."""
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


def product_call(dtype: str, product: Product) -> Json:
    """A product as emitted programs make it, whose backward makes two others."""
    m, n, k, batch = product.m, product.n, product.k, product.batch

    def factor(*shape: int, warm: bool) -> Json:
        return tensor(shape if batch == 1 else (batch, *shape), dtype, warm=warm)

    def row(m: int, n: int, k: int) -> Json:
        return {"table": "product", "dtype": dtype, "m": m, "n": n, "k": k, "batch": batch}

    if batch == 1:
        call, weight = "linear(x0, x1)", factor(n, k, warm=False)
    else:
        call, weight = "x0 @ x1", factor(k, n, warm=True)
    return {
        "call": call,
        "module": FUNCTIONAL,
        "inputs": {"x0": factor(m, k, warm=True), "x1": weight},
        "row": row(m, n, k),
        "backward": [{"wrt": [0], "row": row(m, k, n)}, {"wrt": [1], "row": row(n, k, m)}],
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
    plain = [product for product in products if product["batch"] == 1]
    if not plain:
        return
    ranges = list[tuple[int, int]]()
    for key in "mnk":
        sizes = [product[key] for product in plain]
        ranges.append((min(sizes), max(sizes)))
    for point in range(1, GRID + 1):
        shape = list[int]()
        for (least, most), base in zip(ranges, (2, 3, 5), strict=True):
            size = least * (most / least) ** _halton(point, base)
            shape.append(round(size / 8) * 8 or 8)
        yield product_call(plain[0]["dtype"], Product(*shape))


def _halton(index: int, base: int) -> float:
    """A point in [0, 1) of van der Corput's sequence: the digits of its index, mirrored."""
    point, part = 0.0, 1.0
    while index:
        part /= base
        index, digit = divmod(index, base)
        point += part * digit
    return point
