"""The summary of a compiled plan: its size, its communication, and the command that starts it."""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from shlex import quote

from attrs import frozen

from ..analysis.collective import Collective
from ..analysis.communication import active_count, collectives, parameter_count, places
from ..analysis.elastic import elastic_axis, elastic_words, every_size, left_out, sizes, smallest
from ..analysis.kernel_tiles import chip
from ..analysis.memory import account, at_loads, fits
from ..analysis.recompute_cut import added, again
from ..analysis.time import expected
from ..config.settings import AUTO, TRITON
from ..config.units import amount, counted
from ..ir import MICROBATCHES, Program, walk
from ..ops import OPS
from ..ops.fused import FUSED

RESTARTS = 10
"""After how many failures of its own ranks a node of an elastic run starts them anew."""

SEPARATE_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Has torchrun's ranks meet in a store of their own at each start, without the keys of an
earlier one.
"""


@frozen
class Launch:
    """How many machines a program runs on, and ranks on each; an elastic one goes on with as
    few as `least`.
    """

    nodes: int
    ranks_per_node: int
    least: int

    def options(self) -> tuple[str, ...]:
        """torchrun's options; with several nodes, `$HEAD` is the one where the others meet."""
        ranks = f"--nproc-per-node={self.ranks_per_node}"
        if self.nodes == 1:
            return "--standalone", ranks
        meeting = "--rdzv-backend=c10d", "--rdzv-endpoint=$HEAD:29500"
        if self.least == self.nodes:
            return f"--nnodes={self.nodes}", ranks, *meeting
        return f"--nnodes={self.least}:{self.nodes}", f"--max-restarts={RESTARTS}", ranks, *meeting

    def command(self, script: PurePath) -> str:
        """The line for a shell that starts `script`."""
        line = " ".join(("torchrun", *self.options(), quote(str(script))))
        return f"{SEPARATE_STORES} {line} --resume auto" if self.least < self.nodes else line


def launch(program: Program) -> Launch:
    """How `program` is started."""
    nodes = program.cluster.nodes
    return Launch(nodes, program.ranks // nodes, smallest(program).cluster.nodes)


def headline(program: Program) -> str:
    """For instance `llama: 131,392 parameters on 4 ranks, dp 2 x tp 2`; with experts, how many
    compute for a token.
    """
    where = (
        f"{counted(program.ranks, 'rank')}, {mesh_words(program)}"
        if program.ranks > 1
        else "one rank"
    )
    where += f" ({each})" if (each := elastic_words(program)) else ""
    return f"{program.name}: {parameters(program)}{',' * bool(program.choices)} on {where}"


def parameters(program: Program) -> str:
    """For instance `131,392 parameters`; with experts, `1,024 parameters, 512 of them active`."""
    active = f", {active_count(program):,} of them active" if program.choices else ""
    return f"{counted(parameter_count(program), 'parameter')}{active}"


def elastic(program: Program) -> str:
    """A table of the sizes of an elastic axis, and those that a step cannot have; "" without
    such an axis.
    """
    if not (axis := elastic_axis(program)):
        return ""
    each = every_size(program)
    times = [expected(it) for it in each]
    columns = [
        ("elastic", *(f"{axis.name} {size}" for size in sizes(program))),
        ("microbatches", *(f"{it.size(MICROBATCHES):,}" for it in each)),
        ("needs", *(amount(account(it).needs) for it in each)),
        *(
            [("a step", *(f"{found.step.seconds:,.3g} s" for found in times if found))]
            if all(times)
            else []
        ),
    ]
    left = left_out(program)
    return "\n".join(
        (*table([*zip(*columns, strict=True)], "lr"), *([f"not {left}"] if left else []))
    )


def tokens(program: Program) -> str:
    """For instance `4,194,304 tokens a step`."""
    return f"{program.train.global_batch * program.train.seq:,} tokens a step"


def mesh_words(program: Program) -> str:
    """The axes as the plan names them, those that were factored with their factors."""
    axes: list[str] = []
    for parent in dict.fromkeys(axis.parent for axis in program.axes):
        its = factors(program, parent)
        parts = " x ".join(f"{name} {program.axis(name).size}" for name in its)
        axes.append(
            parts if its == [parent] else f"{parent} {program.degree(tuple(its))} ({parts})"
        )
    return " x ".join(axes)


def factors(program: Program, parent: str) -> list[str]:
    """The axes that an axis of the plan was factored into; itself for most."""
    return [axis.name for axis in program.axes if axis.parent == parent]


def communication(program: Program) -> str:
    """A table of the collectives of one step by kind and axes, with calls and bytes of one rank.

    With a pipeline one for each rank of its axis; ranks with equal tables share one.
    """
    alike: dict[tuple[Row, ...], list[int]] = {}
    for rank in places(program):
        alike.setdefault(tuple(_communication(program, rank)), []).append(rank)
    if not any(alike):
        return "no communication"
    axis = program.pipeline.axis if program.pipeline else ""
    heads = [
        f"per step and rank {_numbers(ranks)} of {axis}" if axis else "per rank and step"
        for ranks in alike.values()
    ]
    rows = [
        [(head, "axis", "ranks", "calls", "input"), *rows]
        for head, rows in zip(heads, alike, strict=True)
    ]
    return tables(rows)


def needs_by_load(program: Program) -> str:
    """A table of what the rank that needs most needs by the rows that its experts get; "" where all
    ranks get as many.

    For instance `room = 1.25   10,240   45.4 GiB   fits`.
    """
    said = {None: "", True: "fits", False: "does not fit"}
    each = ((load, max(of_ranks, key=lambda it: it.needs)) for load, of_ranks in at_loads(program))
    rows = [(load.name, load.shown, amount(it.needs), said[fits(program, it)]) for load, it in each]
    head = ("rows of a rank's experts", "in a microbatch", "needs", program.cluster.gpu)
    return "\n".join(table([head, *rows])) if rows else ""


def kernels(program: Program) -> str:
    """Whose kernels a program calls, and what is fused, with the plan's lines; "" where they
    are torch's.
    """
    if program.train.kernels != TRITON:
        return ""
    places: dict[str, dict[str, None]] = {}
    for op in walk(program.forward.body):
        if op.kind in FUSED:
            places.setdefault(op.kind, {})[str(op.span)] = None
    fused = "; ".join(f"{kind} at {', '.join(lines)}" for kind, lines in sorted(places.items()))
    return f"kernels: Triton's, with tiles for {chip(program)}" + (
        f"\nfused: {fused}" if fused else ""
    )


def recomputation(program: Program) -> str:
    """The choice of `recompute = auto`, and the time that it adds; "" where the plan says what is
    recomputed.

    For instance `recomputed: rmsnorm at llama.scale:20; adds 0.3% to the computation of a
    microbatch`.
    """
    if program.train.recompute.word != AUTO:
        return ""
    if not program.recomputed:
        return "recomputed: nothing, as a rank has memory for all"
    found, dims = again(program), {dim.name for dim in program.dims}
    layers = [f"all of each of {name}" for name in program.recomputed if name in dims]
    ops = [found[name] for name in program.recomputed if name in found]
    what = ", ".join(
        layers or dict.fromkeys(f"{OPS[op.kind].plan_name} at {op.span}" for op in ops)
    )
    from ..analysis.hardware import hardware

    measure = "the computation" if hardware(program) else "the operations"
    return f"recomputed: {what}; adds {added(program):.1%} to {measure} of a microbatch"


def largest_bucket(program: Program, model: Program) -> str:
    """The size by `bucket = auto` of a plan, which `model` is before any pass; "" where the plan
    says the size.

    For instance `largest bucket: 512.0 MiB, by the seconds of a step on h100_sxm`.
    """
    if model.flow.bucket != AUTO:
        return ""
    from ..analysis.hardware import hardware

    size, on = program.flow.largest, hardware(program)
    why = (
        f"by the seconds of a step on {on.name}"
        if on
        else "as the speed of the cluster's GPU is not known"
    )
    return f"largest bucket: {amount(size) if size else 'unset'}, {why}"


Row = tuple[str, str, str, str, str]


def _communication(program: Program, rank: int) -> list[Row]:
    totals: dict[tuple[str, str, int], list[int]] = {}
    for each in collectives(program, rank):
        kind = f"{each.op} (max)" if each.maximum else each.op
        total = totals.setdefault((kind, axes_of(program, each), each.ranks), [0, 0])
        total[0] += each.count
        total[1] += each.count * each.bytes
    rows = [
        (kind, axes, f"{ranks:,}", f"{n:,}", amount(size))
        for (kind, axes, ranks), (n, size) in totals.items()
    ]
    return sorted(rows)


def _numbers(ranks: Sequence[int]) -> str:
    """For instance `0`, or `1, 2`, or `1 … 14`."""
    if len(ranks) > 2 and [*ranks] == [*range(ranks[0], ranks[-1] + 1)]:
        return f"{ranks[0]} … {ranks[-1]}"
    return ", ".join(map(str, ranks))


def axes_of(program: Program, collective: Collective) -> str:
    """The axes of the mesh as the plan names them, wherever all factors of an axis take part."""
    names: list[str] = []
    for parent in dict.fromkeys(program.axis(name).parent for name in collective.axes):
        its = factors(program, parent)
        taking = [name for name in its if name in collective.axes]
        names += [parent] if taking == its else taking
    return " x ".join(names)


def table(rows: Sequence[Sequence[str]], aligned: str = "llr") -> Iterator[str]:
    """Lines of columns flush left or right, by the letters of `aligned`, whose last is for all
    further columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = [
        str.ljust if letter == "l" else str.rjust
        for letter in aligned.ljust(len(widths), aligned[-1])
    ]
    for row in rows:
        yield "  ".join(
            to(cell, width) for to, cell, width in zip(flush, row, widths, strict=False)
        ).rstrip()


def tables(parts: Sequence[Sequence[Sequence[str]]]) -> str:
    """Tables with columns of one width, blank lines between them."""
    lines = table([row for rows in parts for row in rows])
    return "\n\n".join("\n".join(next(lines) for _ in rows) for rows in parts)
