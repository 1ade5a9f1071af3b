"""The formulas of the step's ops, with operands and attributes filled in.

Non-goals: which lines they are parts of (`step`), and whether they are right (`readback.numbers`).
"""

from collections.abc import Mapping, Sequence

from ..ir import Op, Program, ops_in
from ..ops import OPS
from ..ops.line import Formula, Line
from .naming import DTYPES, literal

CONDITIONS = "conditions"
"""The field of a formula that takes the keywords by which an update knows what to do."""


def get_line(program: Program, op: Op) -> Line:
    """How the step writes an op."""
    line = OPS[op.kind].line
    assert line, f"emit: nothing does {op.kind} at the scope of the step"
    return line(program, op)


def get_targets(program: Program) -> set[str]:
    """The names that statements give the results of the step's ops."""
    targets = set[str]()
    for op in ops_in(program.region.body):
        if OPS[op.kind].line:
            targets.add(get_line(program, op).target or "")
    return targets


def fill(formula: Formula, op: Op, fields: Mapping[str, str]) -> str:
    """The text of a formula; `fields` are the texts of the operands, by name."""
    attributes = dict[str, str]()
    for name, value in op.attrs:
        attributes[name] = DTYPES[str(value)] if name == "dtype" else literal(value)
    return formula.text.format_map({**attributes, **fields})


def get_fields(op: Op, texts: Sequence[str]) -> dict[str, str]:
    """Texts of an op's operands by the operands' names; of operands that share the last name, the
    sum.
    """
    entry = OPS[op.kind]
    names = [operand.name for operand in entry.operands]
    fields = dict(zip(names, texts, strict=False))
    if entry.variadic:
        summands = texts[len(names) - 1 :]
        total = " + ".join(summands)
        fields[names[-1]] = f"({total})" if len(summands) > 1 else total
    return fields


def get_conditions_text(conditions: Mapping[str, str]) -> str:
    """Conditions as the keywords of a call."""
    return ", ".join(f"{keyword}={text}" for keyword, text in conditions.items())
