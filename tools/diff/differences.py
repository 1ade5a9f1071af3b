"""Two plans side by side: where tensors lie, what is communicated, memory and time, as `scalec
diff` prints them.

Non-goals: whether the two plans train alike (`scalec verify A B`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attrs import frozen

from ...compiler.analysis.communication import collectives, parameter_count, places
from ...compiler.analysis.link_traffic import get_sent_bytes
from ...compiler.analysis.memory import account
from ...compiler.analysis.time.report import Report
from ...compiler.config.units import amount
from ...compiler.ir import MICROBATCHES, Param, Program, base, walk
from ...compiler.ir.printer import print_type
from ...compiler.reports.summary import axes_of, factors, headline, table
from ...compiler.reports.time import seconds

Figures = dict[str, dict[str, Any]]
"""Facts of a plan by section; in a section, a number or a word by its kind or name."""


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
"""The sections, and for each the function that writes its figures."""


def figures(program: Program, time: Report | None) -> Figures:
    """The figures of a program after the last pass.

    The sections of time are there only where `time` is not None.
    """
    figures: Figures = {
        "plan": _plan_figures(program),
        "parameters": {param.name: _type_words(program, param) for param in program.params},
        "values": _types_by_value(program),
        "calls": {},
        "input of calls": {},
        "sent over": {},
        "memory": _memory(program),
    }
    _add_collectives(program, figures)
    if time:
        kinds = {_with_plan_axes(program, kind): spent for kind, spent in time.step.kinds.items()}
        figures["seconds"] = {"step": time.step.seconds, **kinds}
        figures["rates"] = {"tokens/s/GPU": round(time.tokens), "MFU": time.mfu, "HFU": time.hfu}
    return figures


def _plan_figures(program: Program) -> dict[str, Any]:
    """The sizes of the plan: ranks, parameters, the shares of a mixture's sets, microbatches."""
    plan: dict[str, Any] = {"ranks": program.ranks}
    for name in _parents(program):
        plan[f"ranks of {name}"] = program.degree(tuple(factors(program, name)))
    plan["parameters"] = parameter_count(program)
    # each set of a mixture has a part of the sequences
    sets = program.train.data.sets
    total_weight = sum(data_set.weight for data_set in sets)
    for data_set in sets:
        plan[f"share of {data_set.name}"] = data_set.weight / total_weight
    plan["microbatches"] = program.size(MICROBATCHES)
    plan["tokens a step"] = program.train.global_batch * program.train.seq
    return plan


def _types_by_value(program: Program) -> dict[str, str]:
    """The type of each value that has a name in the plan, by its name and its line."""
    types: dict[str, str] = {}
    for op in walk(program.forward.body):
        if op.kind == "coerce":
            continue
        for value in op.outputs:
            if not value.name.startswith("_"):
                types[f"{base(value.name)}, {op.span}"] = _with_plan_axes(
                    program, print_type(value.type)
                )
    return types


def _add_collectives(program: Program, figures: Figures) -> None:
    """Adds the collectives of a step, of the rank that sends most, to the sections of calls."""
    collectives_by_rank = (collectives(program, rank) for rank in places(program))
    for collective in max(collectives_by_rank, key=lambda calls: sum(map(get_sent_bytes, calls))):
        axes = axes_of(program, collective)
        kind = f"{collective.op} over {axes}"
        amounts = (
            ("calls", kind, collective.count),
            ("input of calls", kind, collective.count * collective.bytes),
            ("sent over", axes, get_sent_bytes(collective)),
        )
        for section, key, more in amounts:
            figures[section][key] = figures[section].get(key, 0) + more


def _type_words(program: Program, param: Param) -> str:
    """The type of a parameter, and the axes whose ranks share out its state."""
    words = _with_plan_axes(program, print_type(param.type))
    for bucket in program.buckets:
        if param.name in bucket.params:
            if bucket.shard_axes:
                words += f", state over {', '.join(bucket.shard_axes)}"
            break
    return words


def _parents(program: Program) -> dict[str, None]:
    """The axes as the plan names them, each once."""
    return dict.fromkeys(axis.parent for axis in program.axes)


def _with_plan_axes(program: Program, text: str) -> str:
    """A text that names an axis of the plan where `text` names all factors of this axis."""
    for parent in _parents(program):
        for sign in ("*", " × "):
            text = text.replace(sign.join(factors(program, parent)), parent)
    return text


def _memory(program: Program) -> dict[str, int]:
    """Bytes of a rank, by kind."""
    memory = account(program)
    peak = memory.peak
    return {
        "needs": memory.needs,
        "state": memory.state,
        "saved activations": peak.kept,
        "unsharded": peak.weights + peak.gradients,
        "temporaries": peak.other,
    }


@frozen
class Row:
    """A figure of two plans; None where a plan has none."""

    section: str
    name: str
    first: Any
    second: Any

    @property
    def differs(self) -> bool:
        """Whether the two plans have different figures."""
        return self.first != self.second

    def cells(self) -> tuple[str, ...]:
        """The name, the two figures, and the change from the first to the second."""
        return self.name, self._words(self.first), self._words(self.second), self._change_words()

    def _words(self, figure: Any) -> str:
        if figure is None:
            return ""
        return SECTIONS[self.section](figure)

    def _change_words(self) -> str:
        """The change in words; "" for words, for equal figures, and from 0."""
        if not (isinstance(self.first, int | float) and isinstance(self.second, int | float)):
            return ""
        if not self.first or not self.differs:
            return ""
        return _change(self.second / self.first)


def _change(ratio: float) -> str:
    """For instance `-17.2%`; from ten times as much on, `×37`; "" where it is far more."""
    if ratio > FAR_MORE:
        return ""
    if ratio < TENFOLD:
        return f"{ratio - 1:+.1%}"
    return f"×{ratio:,.0f}"


TENFOLD, FAR_MORE = 10, 1000
"""The ratios from which on a change is written as a multiple, and above which it is not written."""

BOTH = ("seconds", "rates")
"""The sections that are left out where one plan has none, since its GPU is not known."""


def rows(first: Figures, second: Figures) -> Iterator[Row]:
    """All figures side by side.

    A value has a row only where both plans have it, since ops may be fused in one plan.
    """
    for section in SECTIONS:
        a, b = first.get(section, {}), second.get(section, {})
        if section in BOTH and not (a and b):
            continue
        for what in dict.fromkeys((*a, *b)):
            if section != "values" or (what in a and what in b):
                yield Row(section, what, a.get(what), b.get(what))


def text(programs: Sequence[Program], shown: Sequence[Row]) -> str:
    """The rows by section, for people."""
    headlines: list[str] = []
    for name, program in zip("AB", programs, strict=True):
        headlines.append(f"{name}  {headline(program)}")
    parts = ["\n".join(headlines)]
    for section in SECTIONS:
        cells = [row.cells() for row in shown if row.section == section]
        if not cells:
            continue
        has_change = any(change for *_, change in cells)
        head = (section, "A", "B", "change" if has_change else "")
        parts.append("\n".join(table([head, *cells], "lr" if has_change else "l")))
    if not shown:
        parts.append("no difference")
    return "\n\n".join(parts)


def as_json(shown: Sequence[Row]) -> dict[str, dict[str, list[Any]]]:
    """The two figures of each row, by section and name: bytes, seconds, counts, words."""
    sections: dict[str, dict[str, list[Any]]] = {}
    for row in shown:
        sections.setdefault(row.section, {})[row.name] = [row.first, row.second]
    return sections
