"""The report of a step's collectives: purpose, place, count, bytes sent, links.

Non-goals: the list itself (`account`), its figures (`traffic`), and JSON (`emit.plan_json`).
"""

from collections.abc import Iterator, Sequence

from ..analysis.collective import Collective, Use
from ..analysis.communication import collectives, places
from ..analysis.link_traffic import crosses, sent, volumes, whole
from ..analysis.local_program import of_rank
from ..config.units import amount
from ..ir import MICROBATCHES, Program, base
from .summary import axes_of, headline, launch, table

SHOWN = 8
"""How many rows of each use are shown; those that send less are added up."""

USES: dict[Use, str] = {
    "parameters": "parameters gathered",
    "gradients": "gradients reduced",
    "activations": "activations",
    "stages": "between stages",
    "totals": "count, loss and norm",
}

FORMULA = """sent: of n ranks in a ring each sends (n - 1)/n of the whole, in an all_reduce twice that
Ψ: a row's parameters, in elements; (n - 1)/n counts as 1 (Rajbhandari et al. 2020), padding of buckets counts too"""

Row = tuple[str, str, str, str, str, str]


def explain_collectives(program: Program) -> str:
    """What a program after the last pass communicates in a step, for people; of a pipeline the rank that sends most."""
    head, of_all = headline(program), [collectives(program, rank) for rank in places(program)]
    listed = max(of_all, key=_sent)
    if not listed:
        return f"{head}\n\nno communication"
    if program.pipeline:
        program = of_rank(program, of_all.index(listed))
    uses = [rows for use in USES if (rows := list(_use(program, use, listed)))]
    parts = [_tables(uses), "\n".join(table(list(_volumes(program, listed)))), FORMULA]
    return "\n\n".join((head, _verdict(program, listed), *parts))


def _verdict(program: Program, listed: Sequence[Collective]) -> str:
    """How much, and how much of it leaves the machine."""
    total = sum(map(sent, listed))
    outside = sum(sent(each) for each in listed if _links(program, each) == ACROSS)
    where = f"{amount(outside)} of it across nodes" if outside else "all of it within a node"
    if not program.pipeline:
        return f"each rank sends {amount(total)} in a step, {where}"
    return (
        f"rank {listed[0].rank} of {program.pipeline.axis}, which sends most, sends {amount(total)} in a step, {where}"
    )


def _tables(uses: Sequence[Sequence[Row]]) -> str:
    """The uses' rows in columns of one width, blank lines between them."""
    lines = (line.rstrip() for line in table([row for rows in uses for row in rows]))
    return "\n\n".join("\n".join(next(lines) for _ in rows) for rows in uses)


def _use(program: Program, use: Use, listed: Sequence[Collective]) -> Iterator[Row]:
    alike: dict[tuple[str, ...], list[Collective]] = {}
    for each in listed:
        if each.use == use:
            alike.setdefault(_alike(program, each), []).append(each)
    if not alike:
        return
    largest = sorted(alike.items(), key=lambda row: -_sent(row[1]))
    yield USES[use], "where and how often", "calls", "the whole", "sent", "links"
    for (op, where, size, links), same in largest[:SHOWN]:
        yield op, where, f"{_calls(same):,}", size, amount(_sent(same)), links
    rest = [each for _, same in largest[SHOWN:] for each in same]
    if rest:
        yield (
            f"{len(largest) - SHOWN} other{'s' * (len(largest) > SHOWN + 1)}",
            "",
            f"{_calls(rest):,}",
            "",
            amount(_sent(rest)),
            "",
        )
    if len(largest) > 1:
        every = [each for _, same in largest for each in same]
        yield "total", "", f"{_calls(every):,}", "", amount(_sent(every)), ""


def _alike(program: Program, each: Collective) -> tuple[str, str, str, str]:
    """What rows are told apart by: op and axes, place, size, links."""
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
    turns = (_turns(program, loop, each.last) for loop in each.loops)
    return ", ".join(filter(None, (each.where, " x ".join(turns))))


def _turns(program: Program, loop: str, last: bool) -> str:
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


def _volumes(program: Program, listed: Sequence[Collective]) -> Iterator[Row]:
    yield "parameters on a rank", "in", "Ψ", "gathered", "reduced", "total"
    for it in volumes(program, listed):
        what = f"per iteration of {', '.join(it.turns)}" if it.turns else "others"
        gathered, reduced = it.gathered / it.parameters, it.reduced / it.parameters
        moved = (f"{gathered:,.2f}Ψ", f"{reduced:,.2f}Ψ", f"{gathered + reduced:,.2f}Ψ")
        yield what, f"{it.buckets} bucket{'s' * (it.buckets > 1)}", f"{it.parameters:,}", *moved
