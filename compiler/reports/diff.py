"""Two plans side by side: where tensors lie, what is communicated, memory and time, as `scalec
diff` prints them.

Non-goals: whether both train alike (`scalec verify A B`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import frozen

from ..analysis.communication import collectives, parameter_count, places
from ..analysis.link_traffic import sent
from ..analysis.memory import account
from ..analysis.time.report import Report
from ..config.units import amount
from ..ir import MICROBATCHES, Param, Program, base, walk
from ..ir.printer import print_type
from .summary import axes_of, factors, headline, table
from .time import seconds

Figures = dict[str, dict[str, Any]]
"""Facts of a plan, by section: its kinds or names, and for each a number or a word."""


def _number(value: float) -> str:
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


SECTIONS: dict[str, Callable[[Any], str]] = {
    "plan": _number,
    "parameters": str,
    "values": str,
    "calls": _number,
    "input of calls": amount,
    "sent over": amount,
    "memory": amount,
    "seconds": seconds,
    "rates": _number,
}
"""The sections, and how their figures are written."""


def figures(program: Program, time: Report | None) -> Figures:
    """The figures of a program after the last pass, and of its time where that is known."""
    sizes = {
        f"ranks of {name}": program.degree(tuple(factors(program, name)))
        for name in _parents(program)
    }
    sets = program.train.data.sets  # of a mixture, of which each is a part of the sequences
    found: Figures = {
        "plan": {"ranks": program.ranks, **sizes, "parameters": parameter_count(program)}
        | {f"share of {each.name}": each.weight / sum(it.weight for it in sets) for each in sets}
        | {
            "microbatches": program.size(MICROBATCHES),
            "tokens a step": program.train.global_batch * program.train.seq,
        },
        "parameters": {param.name: _placed(program, param) for param in program.params},
        "values": {},
        "calls": {},
        "input of calls": {},
        "sent over": {},
        "memory": _memory(program),
    }
    for op in walk(program.forward.body):
        if op.kind != "coerce":
            named = (it for it in op.outputs if not it.name.startswith("_"))
            found["values"] |= {
                f"{base(it.name)}, {op.span}": _named(program, print_type(it.type)) for it in named
            }
    for each in max(
        (collectives(program, rank) for rank in places(program)), key=lambda of: sum(map(sent, of))
    ):
        axes = axes_of(program, each)
        sums = (("calls", each.count), ("input of calls", each.count * each.bytes))
        for section, key, more in (
            *((it, f"{each.op} over {axes}", n) for it, n in sums),
            ("sent over", axes, sent(each)),
        ):
            found[section][key] = found[section].get(key, 0) + more
    if time:
        kinds = {_named(program, kind): spent for kind, spent in time.step.kinds.items()}
        found["seconds"] = {"step": time.step.seconds, **kinds}
        found["rates"] = {"tokens/s/GPU": round(time.tokens), "MFU": time.mfu, "HFU": time.hfu}
    return found


def _placed(program: Program, param: Param) -> str:
    """The type of a parameter, and over which axes ranks share out what is kept of it."""
    over = next((it.shard_axes for it in program.buckets if param.name in it.params), ())
    return _named(program, print_type(param.type)) + (
        f", state over {', '.join(over)}" if over else ""
    )


def _parents(program: Program) -> dict[str, None]:
    """The axes as the plan names them."""
    return dict.fromkeys(axis.parent for axis in program.axes)


def _named(program: Program, text: str) -> str:
    """A text with an axis of the plan in place of all of its factors."""
    for parent in _parents(program):
        for sign in ("*", " × "):
            text = text.replace(sign.join(factors(program, parent)), parent)
    return text


def _memory(program: Program) -> dict[str, int]:
    """Bytes of a rank."""
    it = account(program)
    found = {"needs": it.needs, "state": it.state, "saved activations": it.peak.kept}
    return found | {"unsharded": it.peak.weights + it.peak.gradients, "temporaries": it.peak.other}


@frozen
class Row:
    """A figure of two plans; None where a plan has none."""

    section: str
    what: str
    first: Any
    second: Any

    @property
    def differs(self) -> bool:
        """Whether it is another in each."""
        return self.first != self.second

    def cells(self) -> tuple[str, ...]:
        """Its name, both figures, and the change from the first to the second."""
        shown = (
            "" if it is None else SECTIONS[self.section](it) for it in (self.first, self.second)
        )
        numbers = (
            isinstance(self.first, int | float)
            and isinstance(self.second, int | float)
            and self.first
        )
        return (
            self.what,
            *shown,
            _change(self.second / self.first) if numbers and self.differs else "",
        )


def _change(ratio: float) -> str:
    """For instance `-17.2%`, or `×37` of what is ten times as much or more; "" of what is far
    more.
    """
    if ratio > FAR_MORE:
        return ""
    return f"{ratio - 1:+.1%}" if ratio < TENFOLD else f"×{ratio:,.0f}"


TENFOLD, FAR_MORE = 10, 1000

BOTH = ("seconds", "rates")
"""The sections that are left out where one plan has none, since its GPU is not known."""


def rows(first: Figures, second: Figures) -> Iterator[Row]:
    """All figures side by side; of values, those that both plans have: ops may be fused in one."""
    for section in SECTIONS:
        a, b = first.get(section, {}), second.get(section, {})
        for what in dict.fromkeys((*a, *b)) if section not in BOTH or (a and b) else ():
            if section != "values" or (what in a and what in b):
                yield Row(section, what, a.get(what), b.get(what))


def text(programs: Sequence[Program], shown: Sequence[Row]) -> str:
    """The rows by section, for people."""
    parts = [
        "\n".join(
            f"{name}  {headline(program)}" for name, program in zip("AB", programs, strict=True)
        )
    ]
    for section in SECTIONS:
        if own := [row.cells() for row in shown if row.section == section]:
            change = "change" * any(cells[3] for cells in own)
            parts.append(
                "\n".join(table([(section, "A", "B", change), *own], "lr" if change else "l"))
            )
    return "\n\n".join(parts if shown else [*parts, "no difference"])


def as_json(shown: Sequence[Row]) -> dict[str, dict[str, list[Any]]]:
    """By section and name, both figures: bytes, seconds, counts, words."""
    return {
        section: {row.what: [row.first, row.second] for row in shown if row.section == section}
        for section in dict.fromkeys(row.section for row in shown)
    }
