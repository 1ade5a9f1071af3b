"""The summary of a compiled plan: its size, its communication, and the command that starts it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import PurePath
from shlex import quote

from attrs import frozen

from ..analysis.collective import Collective
from ..analysis.communication import active_count, collectives, parameter_count, places
from ..analysis.elastic import (
    elastic_axis,
    elastic_words,
    every_size,
    get_left_out_words,
    sizes,
    smallest,
)
from ..analysis.kernel_tiles import chip
from ..analysis.memory import account, at_loads, fits
from ..analysis.recompute_cut import get_added_time, get_recomputed_ops
from ..analysis.time import get_expected_report
from ..config.settings import AUTO, TRITON
from ..config.units import amount, count_words
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
    """How many machines a program runs on, and how many ranks on each; an elastic program goes
    on with as few machines as `least`.
    """

    nodes: int
    ranks_per_node: int
    least: int

    def options(self) -> tuple[str, ...]:
        """torchrun's options; with several nodes, the nodes meet at the node `$HEAD`."""
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
        if self.least < self.nodes:
            return f"{SEPARATE_STORES} {line} --resume auto"
        return line


def get_launch(program: Program) -> Launch:
    """How `program` is started."""
    nodes = program.cluster.nodes
    return Launch(nodes, program.ranks // nodes, smallest(program).cluster.nodes)


def headline(program: Program) -> str:
    """For instance `llama: 131,392 parameters on 4 ranks, dp 2 x tp 2`; with experts, how many
    parameters compute for a token.
    """
    where = "one rank"
    if program.ranks > 1:
        where = f"{count_words(program.ranks, 'rank')}, {mesh_words(program)}"
    if other_sizes := elastic_words(program):
        where += f" ({other_sizes})"
    return f"{program.name}: {parameters(program)}{',' * bool(program.choices)} on {where}"


def parameters(program: Program) -> str:
    """For instance `131,392 parameters`; with experts, `1,024 parameters, 512 of them active`."""
    words = count_words(parameter_count(program), "parameter")
    if program.choices:
        words += f", {active_count(program):,} of them active"
    return words


def elastic(program: Program) -> str:
    """A table of the sizes of an elastic axis, and the sizes that a step cannot have; "" without
    such an axis.
    """
    if not (axis := elastic_axis(program)):
        return ""
    head, rows = ["elastic", "microbatches", "needs"], list[list[str]]()
    times = list[str]()
    for size, resized in zip(sizes(program), every_size(program), strict=True):
        microbatches = f"{resized.size(MICROBATCHES):,}"
        rows.append([f"{axis.name} {size}", microbatches, amount(account(resized).needs)])
        if report := get_expected_report(resized):
            times.append(f"{report.step.seconds:,.3g} s")
    if len(times) == len(rows):
        head.append("a step")
        for row, time in zip(rows, times, strict=True):
            row.append(time)
    lines = [*table([head, *rows], "lr")]
    if left := get_left_out_words(program):
        lines.append(f"not {left}")
    return "\n".join(lines)


def tokens(program: Program) -> str:
    """For instance `4,194,304 tokens a step`."""
    return f"{program.train.global_batch * program.train.seq:,} tokens a step"


def mesh_words(program: Program) -> str:
    """The axes as the plan names them; an axis that was factored has its factors beside it."""
    axes: list[str] = []
    for parent in dict.fromkeys(axis.parent for axis in program.axes):
        names = factors(program, parent)
        parts = " x ".join(f"{name} {program.axis(name).size}" for name in names)
        if names == [parent]:
            axes.append(parts)
        else:
            axes.append(f"{parent} {program.degree(tuple(names))} ({parts})")
    return " x ".join(axes)


def factors(program: Program, parent: str) -> list[str]:
    """The axes that an axis of the plan was factored into; itself for most."""
    return [axis.name for axis in program.axes if axis.parent == parent]


def communication(program: Program) -> str:
    """A table of the collectives of one step by kind and axes, with calls and bytes of one rank.

    A pipeline has a table for each rank of its axis; ranks with equal tables share one.
    """
    alike: dict[tuple[Row, ...], list[int]] = {}
    for rank in places(program):
        alike.setdefault(tuple(_communication(program, rank)), []).append(rank)
    if not any(alike):
        return "no communication"
    parts: list[list[Row]] = []
    for rows, ranks in alike.items():
        head = "per rank and step"
        if program.pipeline:
            head = f"per step and rank {_numbers(ranks)} of {program.pipeline.axis}"
        parts.append([(head, "axis", "ranks", "calls", "input"), *rows])
    return tables(parts)


def needs_by_load(program: Program) -> str:
    """A table of the memory that the most loaded rank needs, by the rows that its experts get; ""
    where all ranks get as many.

    For instance `room = 1.25   10,240   45.4 GiB   fits`.
    """
    verdicts = {None: "", True: "fits", False: "does not fit"}
    rows: list[tuple[str, str, str, str]] = []
    for load, accounts in at_loads(program):
        most = max(accounts, key=lambda account: account.needs)
        rows.append((load.name, load.row_words, amount(most.needs), verdicts[fits(program, most)]))
    if not rows:
        return ""
    head = ("rows of a rank's experts", "in a microbatch", "needs", program.cluster.gpu)
    return "\n".join(table([head, *rows]))


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
    words = f"kernels: Triton's, with tiles for {chip(program)}"
    if places:
        fused = "; ".join(f"{kind} at {', '.join(lines)}" for kind, lines in sorted(places.items()))
        words += f"\nfused: {fused}"
    return words


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
    ops_again, dims = get_recomputed_ops(program), {dim.name for dim in program.dims}
    layers = [f"all of each of {name}" for name in program.recomputed if name in dims]
    ops: dict[str, None] = {}
    for name in program.recomputed:
        if name in ops_again:
            op = ops_again[name]
            ops[f"{OPS[op.kind].plan_name} at {op.span}"] = None
    what = ", ".join(layers or ops)
    from ..analysis.hardware import hardware

    measure = "the computation" if hardware(program) else "the operations"
    return f"recomputed: {what}; adds {get_added_time(program):.1%} to {measure} of a microbatch"


def largest_bucket(program: Program, model: Program) -> str:
    """The size by `bucket = auto` of a plan, which `model` is before any pass; "" where the plan
    says the size.

    For instance `largest bucket: 512.0 MiB, by the seconds of a step on h100_sxm`.
    """
    if model.flow.bucket != AUTO:
        return ""
    from ..analysis.hardware import hardware

    size, on = program.flow.largest, hardware(program)
    why = "as the speed of the cluster's GPU is not known"
    if on:
        why = f"by the seconds of a step on {on.name}"
    bytes = amount(size) if size else "unset"
    return f"largest bucket: {bytes}, {why}"


Row = tuple[str, str, str, str, str]


def _communication(program: Program, rank: int) -> list[Row]:
    calls, sizes_of_input = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
    for collective in collectives(program, rank):
        kind = f"{collective.op} (max)" if collective.maximum else collective.op
        key = (kind, axes_of(program, collective), collective.ranks)
        calls[key] += collective.count
        sizes_of_input[key] += collective.count * collective.bytes
    rows: list[Row] = []
    for (kind, axes, ranks), count in calls.items():
        size = sizes_of_input[kind, axes, ranks]
        rows.append((kind, axes, f"{ranks:,}", f"{count:,}", amount(size)))
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
        factors_of_axis = factors(program, parent)
        taking_part = [name for name in factors_of_axis if name in collective.axes]
        if taking_part == factors_of_axis:
            names.append(parent)
        else:
            names.extend(taking_part)
    return " x ".join(names)


def table(rows: Sequence[Sequence[str]], aligned: str = "llr") -> Iterator[str]:
    """Lines of columns flush left or right, by the letters of `aligned`, whose last is for all
    further columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    letters = aligned.ljust(len(widths), aligned[-1])
    for row in rows:
        cells: list[str] = []
        for letter, cell, width in zip(letters, row, widths, strict=False):
            cells.append(cell.ljust(width) if letter == "l" else cell.rjust(width))
        yield "  ".join(cells).rstrip()


def tables(parts: Sequence[Sequence[Sequence[str]]]) -> str:
    """Tables with columns of one width, blank lines between them."""
    lines = table([*chain.from_iterable(parts)])
    return "\n\n".join("\n".join(islice(lines, len(rows))) for rows in parts)
