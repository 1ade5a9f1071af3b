"""The reports of `scalec explain`: memory, collectives, the meaning of a code."""

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from ..analysis.collective import Collective, Use
from ..analysis.communication import collectives, places
from ..analysis.context_parallel import costs, sequence_axes, strategy
from ..analysis.expert_loads import loads
from ..analysis.link_traffic import crosses, sent, volumes, whole
from ..analysis.memory import (
    SAID,
    VERDICTS,
    Account,
    Kept,
    NeedRange,
    PeakSnapshot,
    account,
    capacity,
    need_range,
    place,
    why_unknown,
)
from ..analysis.memory.reserve import looks_in_update
from ..analysis.overlap import beside
from ..analysis.stage_program import rank_programs
from ..config.units import amount, counted
from ..ir import MICROBATCHES, Op, Program, base, blocks
from ..ops.experts import EXCHANGE
from ..syntax.diagnostics import CODES
from .job import checkpoint_bytes
from .summary import axes_of, headline, launch, needs_by_load, recomputation, table, tables


def texts() -> dict[str, Any]:
    """The content of codes.toml: a table for each code, and `plan`, which their words complete."""
    return tomllib.loads(Path(__file__).with_name("codes.toml").read_text(encoding="utf-8"))


def explain_code(code: str) -> str:
    """All that is known of one of CODES, for people."""
    entry = texts()[code]
    parts = [f"{code}: {CODES[code]}", entry["text"]]
    words = {kind: dedent(entry[kind]).rstrip() for kind in ("wrong", "right") if kind in entry}
    parts += [f"{kind}:\n\n{indent(each, '  ')}" for kind, each in words.items()]
    return "\n\n".join(parts)


ACTIVATIONS_SHOWN = 12
"""How many rows of what forward keeps are shown; the smaller ones are added up."""


def memory(program: Program) -> str:
    """The account of a program after the last pass, for people."""
    it = account(program)
    held = ["\n".join(table(list(_always(it)))), *_range(need_range(program, it))]
    held += [*_padding(it), *_watched(program), _host(program, it)]
    parts = [*held, "\n".join(table(list(_kept(it))))]
    verdict = (
        headline(program),
        _memory_verdict(program, it),
        needs_by_load(program),
        recomputation(program),
    )
    return "\n\n".join(filter(None, (*verdict, *parts)))


def _memory_verdict(program: Program, it: Account) -> str:
    """Whether it fits."""
    needs = f"needs {amount(it.needs)} on {place(program, it)}"
    gpu, room = program.cluster.gpu, capacity(program)
    if room is None:
        said = f"; `cluster {{ {SAID} }}` gives it" if gpu else ""
        return (
            f"{needs}, counted for the {'CPU' if it.device == 'cpu' else 'GPU'}:"
            f" {why_unknown(program)}{said}"
        )
    of = need_range(program, it)
    if of.fits(room) is None:
        needs += f" ({amount(of.low)} to {amount(of.high)})"
    return f"{VERDICTS[of.fits(room)]}: {needs}; {gpu} has {amount(room)}"


def _range(of: NeedRange) -> Iterator[str]:
    """The range of the need, with its reasons; nothing where it is one number."""
    if of.reasons:
        rows = [
            (it.what, _less(it.less), f"+{amount(it.more)}" if it.more else "") for it in of.reasons
        ]
        head, total = (
            ("the total may be", "less", "more"),
            ("needs", amount(of.low), amount(of.high)),
        )
        yield "\n".join(table([head, *rows, total], "lrr"))


def _less(size: int) -> str:
    """Bytes to be taken away, as people read them."""
    return f"-{amount(size)}" if size else ""


def _always(it: Account) -> Iterator[tuple[str, str, str]]:
    """Memory at its peak, by kind: these add up."""
    buckets = it.buckets
    slots = ", ".join(dict.fromkeys(name for bucket in buckets for name, _ in bucket.slots))
    parts = "layers" if it.rank is None else "stages"
    held = [
        ("parameters", "", sum(bucket.parameters for bucket in buckets)),
        ("masters", "", sum(bucket.masters for bucket in buckets)),
        ("gradients", "", sum(bucket.gradients for bucket in buckets)),
        (
            "optimizer",
            slots,
            it.state - sum(b.parameters + b.masters + b.gradients for b in buckets),
        ),
        ("inputs", "of all microbatches", it.inputs),
        ("tables", "rotary positions", it.tables),
        (
            "saved activations",
            "of one microbatch" if it.rank is None else "of microbatches in flight",
            it.peak.kept,
        ),
        ("unsharded weights", f"of {parts}, temporarily", it.peak.weights),
        ("unsharded gradients", f"of {parts}, temporarily", it.peak.gradients),
        ("temporaries", moment(it.peak), it.peak.other),
        ("reserve", "driver, CUDA, cuBLAS, NCCL", it.reserve),
        ("total", "at peak memory", it.needs),
    ]
    yield "per rank", "", "bytes"
    yield from ((what, detail, amount(size)) for what, detail, size in held if size)


def _padding(it: Account) -> Iterator[str]:
    """Padding of the state, if there is any."""
    if it.padding:
        share = f"{amount(it.padding)}, {it.padding / it.state:.1%}"
        yield (
            "padding of buckets, so that shards are equal and end between rows of tensors:"
            f" {share} of state"
        )


def _watched(program: Program) -> Iterator[str]:
    """The memory of looks, if there are any."""
    if size := looks_in_update(program):
        pieces = (
            ", and for pieces of the state that `replay` updates twice"
            if program.watch.replay
            else ""
        )
        yield (
            f"watch: {amount(size)} during the update, for hashes, whose keys are among the"
            f" tables{pieces}"
        )


def _host(program: Program, it: Account) -> str:
    """The copy from which checkpoints are written; all ranks together copy one checkpoint."""
    ranks = launch(program).ranks_per_node
    node = amount(min(ranks * it.host, max(it.host, checkpoint_bytes(program))))
    return (
        f"copied to host memory at a save: up to {amount(it.host)} of a rank"
        + f", {node} of a node" * (ranks > 1)
    )


def moment(it: PeakSnapshot) -> str:
    """For instance `backward of w_down, layers 126 of 126, llama.scale:28`."""
    if it.op is None:
        return it.where
    layers = [f"{dim} {at:,} of {size:,}" for dim, at, size in it.layers]
    return ", ".join([f"{it.where} of {it.name}", *layers, str(it.op.span)])


def _kept(it: Account) -> Iterator[tuple[str, str, str]]:
    """Saved activations by op and plan line, the largest first."""
    rows: dict[tuple[str, str], list[Kept]] = {}
    for kept in it.kept:
        rows.setdefault((kept.op.kind, str(kept.op.span)), []).append(kept)
    sizes = sorted(
        ((sum(k.total for k in all_), *row) for row, all_ in rows.items()), key=lambda row: -row[0]
    )
    yield (
        "saved activations" if it.rank is None else "saved activations of a microbatch",
        "line",
        "bytes",
    )
    yield from ((kind, line, amount(size)) for size, kind, line in sizes[:ACTIVATIONS_SHOWN])
    if rest := sizes[ACTIVATIONS_SHOWN:]:
        yield f"{len(rest)} others", "", amount(sum(size for size, _, _ in rest))
    yield "total", "", amount(it.activations)
    yield from _until_peak(it)


def _until_peak(it: Account) -> Iterator[tuple[str, str, str]]:
    """The step from one microbatch's saved activations to the line above: what is in memory
    when memory peaks.
    """
    difference = it.peak.kept - it.activations
    if difference > 0:
        yield "other microbatches in flight", "", amount(difference)
    elif difference < 0:
        yield "freed before the peak, or saved after it", "", _less(-difference)
    if difference:
        yield "saved activations at peak memory", "", amount(it.peak.kept)


COLLECTIVES_SHOWN = 8
"""How many rows of each use are shown; those that send less are added up."""

USES: dict[Use, str] = {
    "parameters": "parameters gathered",
    "gradients": "gradients reduced",
    "activations": "activations",
    "stages": "between stages",
    "totals": "count, loss and norm",
}

FORMULA = (
    "sent: of n ranks in a ring each sends (n - 1)/n of the whole, in an all_reduce twice that\n"
    "Ψ: a row's parameters, in elements; (n - 1)/n counts as 1 (Rajbhandari et al. 2020), padding"
    " of buckets counts too"
)

Row = tuple[str, str, str, str, str, str]


def explain_collectives(program: Program) -> str:
    """The communication of a step, for people; of a pipeline the rank that sends most."""
    head, of_all = headline(program), [collectives(program, rank) for rank in places(program)]
    listed = max(of_all, key=_sent)
    if not listed:
        return f"{head}\n\nno communication"
    exchanged = [*_exchanges(program, of_all.index(listed)), *_beside(program)]
    if program.pipeline:
        program = rank_programs(program)[of_all.index(listed)]
    uses = [rows for use in USES if (rows := list(_use(program, use, listed)))]
    parts = [
        tables(uses),
        *_strategies(program),
        "\n".join(table(list(_volumes(program, listed)))),
        FORMULA,
    ]
    parts[1:1] = exchanged
    return "\n\n".join((head, _traffic_verdict(program, listed), *parts))


def _exchanges(program: Program, rank: int) -> list[str]:
    """The exchanges of rows, by the rows that a rank's experts get."""
    found = [
        (load, [it for it in collectives(load.program, rank) if it.ragged])
        for load in loads(program)
    ]
    rows = [
        (it.name, it.shown, amount(max(i.bytes for i in of)), amount(_sent(of)))
        for it, of in found
        if of
    ]
    head = ("rows of a rank's experts", "in a microbatch", "an exchange", "sent in a step")
    return ["\n".join(table([head, *rows]))] if rows else []


def _beside(program: Program) -> list[str]:
    """The products, by their weights, that run beside each exchange of rows which begins before
    it is awaited.
    """
    names = [param.name for param in program.params]
    found: list[tuple[str, str]] = []
    for block in blocks(program.microbatches):
        for exchange, ops in beside(block.body):
            values = [
                name for op in ops for name in (*op.inputs, *(value.name for value in op.outputs))
            ]
            weights = dict.fromkeys(
                name for value in values if (name := base(value).removeprefix("d_")) in names
            )
            to = "to experts" if exchange.kind == EXCHANGE.name else "to tokens"
            found.append((f"{block.kind}, {to}", ", ".join(weights) or "nothing"))
    head = ("exchanges of rows", "beside products of")
    return ["\n".join(table([head, *dict.fromkeys(found)]))] if found else []


def _traffic_verdict(program: Program, listed: Sequence[Collective]) -> str:
    """How much, and how much of it leaves the machine."""
    total = sum(map(sent, listed))
    outside = sum(sent(each) for each in listed if _links(program, each) == ACROSS)
    where = f"{amount(outside)} of it across nodes" if outside else "all of it within a node"
    if not program.pipeline:
        return f"each rank sends {amount(total)} in a step, {where}"
    return (
        f"rank {listed[0].rank} of {program.pipeline.axis}, which sends most, sends"
        f" {amount(total)} in a step, {where}"
    )


def _use(program: Program, use: Use, listed: Sequence[Collective]) -> Iterator[Row]:
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for each in listed:
        if each.use == use:
            alike.setdefault(described(program, each), []).append(each)
    if not alike:
        return
    largest = sorted(alike.items(), key=lambda row: -_sent(row[1]))
    yield USES[use], "where and how often", "calls", "the whole", "sent", "links"
    for (op, where, size, links), same in largest[:COLLECTIVES_SHOWN]:
        yield op, where, f"{_calls(same):,}", size, amount(_sent(same)), links
    rest = [each for _, same in largest[COLLECTIVES_SHOWN:] for each in same]
    if rest:
        yield (
            f"{len(largest) - COLLECTIVES_SHOWN}"
            f" other{'s' * (len(largest) > COLLECTIVES_SHOWN + 1)}",
            "",
            f"{_calls(rest):,}",
            "",
            amount(_sent(rest)),
            "",
        )
    if len(largest) > 1:
        every = [each for _, same in largest for each in same]
        yield "total", "", f"{_calls(every):,}", "", amount(_sent(every)), ""


def described(program: Program, each: Collective) -> tuple[str, str, str, str]:
    """An entry in words, by which alike ones share a row: op and axes, place, size, links."""
    op = f"{each.op} (max)" if each.maximum else each.op
    axes = axes_of(program, each)
    over = f"{op} over {axes}, {each.ranks:,} ranks"
    if each.peer is not None:
        over = f"{op} {'to' if op == 'send' else 'from'} rank {each.peer} of {axes}"
    return over, _where(program, each), f"{whole(each):,} x {each.dtype}", _links(program, each)


def _where(program: Program, each: Collective) -> str:
    """For instance `backward, last microbatch x 80 layers`, or `after stage 2`."""
    if each.chunk:
        stages = f"stage{'s' * (len(each.chunk) > 1)} {', '.join(map(str, each.chunk))}"
        return f"{'before' if each.use == 'parameters' else 'after'} {stages}"
    layers = [_layers(program, loop, each.last) for loop in each.loops]
    layers += [f"{each.times:,} hops"] if each.times > 1 else []
    return ", ".join(filter(None, (each.where, " x ".join(layers))))


def _layers(program: Program, loop: str, last: bool) -> str:
    count = program.size(base(loop))
    if loop == MICROBATCHES and (last or count == 1):
        return "last microbatch" if last else "1 microbatch"
    return f"{count:,} {base(loop)}"


WITHIN, ACROSS = "within a node", "across nodes"


def _links(program: Program, each: Collective) -> str:
    among = each.among if each.peer is None else (each.rank or 0, each.peer)
    return ACROSS if crosses(program, each.axes, launch(program).ranks_per_node, among) else WITHIN


def _calls(listed: Sequence[Collective]) -> int:
    return sum(each.count for each in listed)


def _sent(listed: Sequence[Collective]) -> int:
    return sum(map(sent, listed))


def _strategies(program: Program) -> Iterator[str]:
    """For each axis over which a sequence lies in attention, what a layer would send by each
    strategy.
    """
    rows = (
        [*_costs(program, op, axis)] for op in program.ops for axis in sequence_axes(program, op)
    )
    yield from dict.fromkeys("\n".join(table(each)) for each in rows)


def _costs(program: Program, op: Op, axis: str) -> Iterator[Row]:
    own = strategy(program, op, axis)
    yield f"keys over {axis}, a layer", "forward", "sent", "backward", "sent", "keys kept"
    for each in costs(program, op, axis):
        word = f"via {each.strategy}{', as the plan says' * (each.strategy == own)}"
        (calls, sent_), (back, sent_back) = each.forward, each.backward
        yield (
            word,
            counted(calls, "call"),
            amount(sent_),
            counted(back, "call"),
            amount(sent_back),
            amount(each.kept),
        )


def _volumes(program: Program, listed: Sequence[Collective]) -> Iterator[Row]:
    yield "parameters on a rank", "in", "Ψ", "gathered", "reduced", "total"
    for it in volumes(program, listed):
        what = f"per iteration of {', '.join(it.layers)}" if it.layers else "others"
        gathered, reduced = it.gathered / it.parameters, it.reduced / it.parameters
        moved = (f"{gathered:,.2f}Ψ", f"{reduced:,.2f}Ψ", f"{gathered + reduced:,.2f}Ψ")
        yield what, f"{it.buckets} bucket{'s' * (it.buckets > 1)}", f"{it.parameters:,}", *moved
