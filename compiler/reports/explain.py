"""The reports of `scalec explain`: memory, collectives, the meaning of a code."""

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import dedent, indent

from ..analysis.collective import Collective, Use
from ..analysis.communication import collectives, places
from ..analysis.context_parallel import costs, sequence_axes, strategy
from ..analysis.expert_loads import loads
from ..analysis.link_traffic import count_whole_elements, crosses, get_sent_bytes, volumes
from ..analysis.memory import (
    SAID,
    VERDICTS,
    Account,
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
from ..config.units import amount, count_words
from ..ir import MICROBATCHES, Op, Program, base, blocks
from ..ops.experts import EXCHANGE
from ..syntax.codes import get_code
from .job import checkpoint_bytes
from .summary import axes_of, get_launch, headline, needs_by_load, recomputation, table, tables


def explain_code(code: str) -> str:
    """The meaning of a code for people, with an example that is wrong and one that is right."""
    row = get_code(code)
    parts = [f"{code}: {row.title}", row.text]
    for kind, words in (("wrong", row.wrong), ("right", row.right)):
        if words:
            example = dedent(words).rstrip()
            parts.append(f"{kind}:\n\n{indent(example, '  ')}")
    return "\n\n".join(parts)


ACTIVATIONS_SHOWN = 12
"""How many rows of what forward keeps are shown; the smaller ones are added up."""


def memory(program: Program) -> str:
    """The account of a program after the last pass, for people."""
    memory = account(program)
    parts = [
        headline(program),
        _memory_verdict(program, memory),
        needs_by_load(program),
        recomputation(program),
        "\n".join(table(list(_by_kind(memory)))),
        *_range(need_range(program, memory)),
        *_padding(memory),
        *_memory_of_looks(program),
        _host(program, memory),
        "\n".join(table(list(_activation_rows(memory)))),
    ]
    return "\n\n".join(filter(None, parts))


def _memory_verdict(program: Program, memory: Account) -> str:
    """Whether the rank that needs most has enough memory."""
    needs = f"needs {amount(memory.needs)} on {place(program, memory)}"
    gpu, room = program.cluster.gpu, capacity(program)
    if room is None:
        remedy = f"; `cluster {{ {SAID} }}` gives it" if gpu else ""
        device = "CPU" if memory.device == "cpu" else "GPU"
        return f"{needs}, counted for the {device}: {why_unknown(program)}{remedy}"
    needs_range = need_range(program, memory)
    if needs_range.fits(room) is None:
        needs += f" ({amount(needs_range.low)} to {amount(needs_range.high)})"
    return f"{VERDICTS[needs_range.fits(room)]}: {needs}; {gpu} has {amount(room)}"


def _range(needs_range: NeedRange) -> Iterator[str]:
    """The range of the need, with its reasons; nothing where it is one number."""
    if not needs_range.reasons:
        return
    rows = [("the total may be", "less", "more")]
    for reason in needs_range.reasons:
        more = f"+{amount(reason.more)}" if reason.more else ""
        rows.append((reason.what, _less(reason.less), more))
    rows.append(("needs", amount(needs_range.low), amount(needs_range.high)))
    yield "\n".join(table(rows, "lrr"))


def _less(size: int) -> str:
    """Bytes to be taken away, as people read them."""
    return f"-{amount(size)}" if size else ""


def _by_kind(memory: Account) -> Iterator[tuple[str, str, str]]:
    """Memory at its peak, by kind: the rows add up."""
    buckets, peak = memory.buckets, memory.peak
    slots = ", ".join(dict.fromkeys(name for bucket in buckets for name, _ in bucket.slots))
    # an account without a rank is of a program without a pipeline
    parts, microbatches = "stages", "of microbatches in flight"
    if memory.rank is None:
        parts, microbatches = "layers", "of one microbatch"
    parameters = sum(bucket.parameters for bucket in buckets)
    masters = sum(bucket.masters for bucket in buckets)
    gradients = sum(bucket.gradients for bucket in buckets)
    rows = [
        ("parameters", "", parameters),
        ("masters", "", masters),
        ("gradients", "", gradients),
        ("optimizer", slots, memory.state - (parameters + masters + gradients)),
        ("inputs", "of all microbatches", memory.inputs),
        ("tables", "rotary positions", memory.tables),
        ("saved activations", microbatches, peak.kept),
        ("unsharded weights", f"of {parts}, temporarily", peak.weights),
        ("unsharded gradients", f"of {parts}, temporarily", peak.gradients),
        ("temporaries", moment(peak), peak.other),
        ("reserve", "driver, CUDA, cuBLAS, NCCL", memory.reserve),
        ("total", "at peak memory", memory.needs),
    ]
    yield "per rank", "", "bytes"
    for kind, detail, size in rows:
        if size:
            yield kind, detail, amount(size)


def _padding(memory: Account) -> Iterator[str]:
    """Padding of the state, if there is any."""
    if memory.padding:
        share = f"{amount(memory.padding)}, {memory.padding / memory.state:.1%}"
        yield (
            "padding of buckets, so that shards are equal and end between rows of tensors:"
            f" {share} of state"
        )


def _memory_of_looks(program: Program) -> Iterator[str]:
    """The memory of looks, if there are any."""
    if size := looks_in_update(program):
        pieces = ""
        if program.watch.replay:
            pieces = ", and for pieces of the state that `replay` updates twice"
        yield (
            f"watch: {amount(size)} during the update, for hashes, whose keys are among the"
            f" tables{pieces}"
        )


def _host(program: Program, memory: Account) -> str:
    """The copy in host memory that a save writes as a checkpoint; all ranks together copy one
    checkpoint.
    """
    ranks = get_launch(program).ranks_per_node
    node = amount(min(ranks * memory.host, max(memory.host, checkpoint_bytes(program))))
    return (
        f"copied to host memory at a save: up to {amount(memory.host)} of a rank"
        + f", {node} of a node" * (ranks > 1)
    )


def moment(snapshot: PeakSnapshot) -> str:
    """For instance `backward of w_down, layers 126 of 126, llama.scale:28`."""
    if snapshot.op is None:
        return snapshot.where
    layers = [f"{dim} {iteration:,} of {size:,}" for dim, iteration, size in snapshot.layers]
    return ", ".join([f"{snapshot.where} of {snapshot.name}", *layers, str(snapshot.op.span)])


def _activation_rows(memory: Account) -> Iterator[tuple[str, str, str]]:
    """Saved activations by op and plan line, the largest first."""
    sizes = Counter[tuple[str, str]]()
    for saved in memory.kept:
        sizes[saved.op.kind, str(saved.op.span)] += saved.total
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    if memory.rank is None:
        yield "saved activations", "line", "bytes"
    else:
        yield "saved activations of a microbatch", "line", "bytes"
    for (kind, line), size in largest[:ACTIVATIONS_SHOWN]:
        yield kind, line, amount(size)
    if others := largest[ACTIVATIONS_SHOWN:]:
        yield f"{len(others)} others", "", amount(sum(size for _, size in others))
    yield "total", "", amount(memory.activations)
    yield from _until_peak(memory)


def _until_peak(memory: Account) -> Iterator[tuple[str, str, str]]:
    """The step from one microbatch's saved activations to the line above: what is in memory
    when memory peaks.
    """
    difference = memory.peak.kept - memory.activations
    if difference > 0:
        yield "other microbatches in flight", "", amount(difference)
    elif difference < 0:
        yield "freed before the peak, or saved after it", "", _less(-difference)
    if difference:
        yield "saved activations at peak memory", "", amount(memory.peak.kept)


COLLECTIVES_SHOWN = 8
"""How many rows of each use are shown; the others, which send less, are added up."""

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
    head = headline(program)
    collectives_by_rank = [collectives(program, rank) for rank in places(program)]
    listed = max(collectives_by_rank, key=_bytes_sent)
    if not listed:
        return f"{head}\n\nno communication"
    rank = collectives_by_rank.index(listed)
    exchanges = [*_exchanges(program, rank), *_beside(program)]
    if program.pipeline:
        program = rank_programs(program)[rank]
    tables_of_uses = [list(_use(program, use, listed)) for use in USES]
    parts = [
        tables([rows for rows in tables_of_uses if rows]),
        *exchanges,
        *_strategies(program),
        "\n".join(table(list(_volumes(program, listed)))),
        FORMULA,
    ]
    return "\n\n".join((head, _traffic_verdict(program, listed), *parts))


def _exchanges(program: Program, rank: int) -> list[str]:
    """The exchanges of rows, by the rows that a rank's experts get."""
    rows: list[tuple[str, str, str, str]] = []
    for load in loads(program):
        exchanges = [call for call in collectives(load.program, rank) if call.ragged]
        if exchanges:
            largest = max(exchange.bytes for exchange in exchanges)
            rows.append(
                (load.name, load.row_words, amount(largest), amount(_bytes_sent(exchanges)))
            )
    if not rows:
        return []
    head = ("rows of a rank's experts", "in a microbatch", "an exchange", "sent in a step")
    return ["\n".join(table([head, *rows]))]


def _beside(program: Program) -> list[str]:
    """The products, by their weights, that run beside an exchange of rows: between its begin
    and its wait.
    """
    names = [param.name for param in program.params]
    rows: list[tuple[str, str]] = []
    for block in blocks(program.microbatches):
        for exchange, ops in beside(block.body):
            weights: dict[str, None] = {}
            for op in ops:
                for value in (*op.inputs, *(output.name for output in op.outputs)):
                    name = base(value).removeprefix("d_")
                    if name in names:
                        weights[name] = None
            to = "to experts" if exchange.kind == EXCHANGE.name else "to tokens"
            rows.append((f"{block.kind}, {to}", ", ".join(weights) or "nothing"))
    if not rows:
        return []
    head = ("exchanges of rows", "beside products of")
    return ["\n".join(table([head, *dict.fromkeys(rows)]))]


def _traffic_verdict(program: Program, listed: Sequence[Collective]) -> str:
    """How much a rank sends, and how much of it leaves the machine."""
    total = sum(map(get_sent_bytes, listed))
    outside = sum(get_sent_bytes(call) for call in listed if _links(program, call) == ACROSS)
    where = f"{amount(outside)} of it across nodes" if outside else "all of it within a node"
    if not program.pipeline:
        return f"each rank sends {amount(total)} in a step, {where}"
    return (
        f"rank {listed[0].rank} of {program.pipeline.axis}, which sends most, sends"
        f" {amount(total)} in a step, {where}"
    )


def _use(program: Program, use: Use, listed: Sequence[Collective]) -> Iterator[Row]:
    """The table of one use; none where no collective is of this use."""
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for call in listed:
        if call.use == use:
            alike.setdefault(describe_collective(program, call), []).append(call)
    if not alike:
        return
    largest = sorted(alike.items(), key=lambda row: -_bytes_sent(row[1]))
    yield USES[use], "where and how often", "calls", "the whole", "sent", "links"
    for (op, where, size, links), same in largest[:COLLECTIVES_SHOWN]:
        yield op, where, f"{_calls(same):,}", size, amount(_bytes_sent(same)), links
    if others := largest[COLLECTIVES_SHOWN:]:
        name = f"{len(others)} other{'s' * (len(others) > 1)}"
        yield _total_row(name, others)
    if len(largest) > 1:
        yield _total_row("total", largest)


def _total_row(name: str, rows: Sequence[tuple[tuple[str, ...], Sequence[Collective]]]) -> Row:
    """A row with the sums of several rows."""
    calls = [call for _, same in rows for call in same]
    return name, "", f"{_calls(calls):,}", "", amount(_bytes_sent(calls)), ""


def describe_collective(program: Program, call: Collective) -> tuple[str, str, str, str]:
    """A collective in words: op and axes, place, size, links.

    Collectives with the same words share a row.
    """
    op = f"{call.op} (max)" if call.maximum else call.op
    axes = axes_of(program, call)
    over = f"{op} over {axes}, {call.ranks:,} ranks"
    if call.peer is not None:
        direction = "to" if op == "send" else "from"
        over = f"{op} {direction} rank {call.peer} of {axes}"
    return (
        over,
        _where(program, call),
        f"{count_whole_elements(call):,} x {call.dtype}",
        _links(program, call),
    )


def _where(program: Program, call: Collective) -> str:
    """For instance `backward, last microbatch x 80 layers`, or `after stage 2`."""
    if call.chunk:
        stages = f"stage{'s' * (len(call.chunk) > 1)} {', '.join(map(str, call.chunk))}"
        # a stage's parameters are gathered before it runs
        when = "before" if call.use == "parameters" else "after"
        return f"{when} {stages}"
    layers = [_layers(program, loop, call.last) for loop in call.loops]
    if call.times > 1:
        layers.append(f"{call.times:,} hops")
    return ", ".join(filter(None, (call.where, " x ".join(layers))))


def _layers(program: Program, loop: str, last: bool) -> str:
    count = program.size(base(loop))
    if loop == MICROBATCHES and (last or count == 1):
        return "last microbatch" if last else "1 microbatch"
    return f"{count:,} {base(loop)}"


WITHIN, ACROSS = "within a node", "across nodes"


def _links(program: Program, call: Collective) -> str:
    """Whether a collective leaves its node, in words."""
    among = call.among
    if call.peer is not None:
        among = (call.rank or 0, call.peer)
    if crosses(program, call.axes, get_launch(program).ranks_per_node, among):
        return ACROSS
    return WITHIN


def _calls(listed: Sequence[Collective]) -> int:
    return sum(call.count for call in listed)


def _bytes_sent(listed: Sequence[Collective]) -> int:
    return sum(map(get_sent_bytes, listed))


def _strategies(program: Program) -> Iterator[str]:
    """For each axis that cuts a sequence in attention, a table of what a layer would send by
    each strategy; equal tables are one.
    """
    texts_of_tables: dict[str, None] = {}
    for op in program.ops:
        for axis in sequence_axes(program, op):
            texts_of_tables["\n".join(table([*_costs(program, op, axis)]))] = None
    yield from texts_of_tables


def _costs(program: Program, op: Op, axis: str) -> Iterator[Row]:
    strategy_of_plan = strategy(program, op, axis)
    yield f"keys over {axis}, a layer", "forward", "sent", "backward", "sent", "keys kept"
    for cost in costs(program, op, axis):
        is_of_plan = cost.strategy == strategy_of_plan
        (calls, sent_), (back, sent_back) = cost.forward, cost.backward
        yield (
            f"via {cost.strategy}{', as the plan says' * is_of_plan}",
            count_words(calls, "call"),
            amount(sent_),
            count_words(back, "call"),
            amount(sent_back),
            amount(cost.key_bytes),
        )


def _volumes(program: Program, listed: Sequence[Collective]) -> Iterator[Row]:
    """The elements that a rank gathers and reduces, in multiples of its parameters Ψ."""
    yield "parameters on a rank", "in", "Ψ", "gathered", "reduced", "total"
    for volume in volumes(program, listed):
        part = "others"
        if volume.layers:
            part = f"per iteration of {', '.join(volume.layers)}"
        gathered = volume.gathered / volume.parameters
        reduced = volume.reduced / volume.parameters
        yield (
            part,
            f"{volume.buckets} bucket{'s' * (volume.buckets > 1)}",
            f"{volume.parameters:,}",
            f"{gathered:,.2f}Ψ",
            f"{reduced:,.2f}Ψ",
            f"{gathered + reduced:,.2f}Ψ",
        )
