"""Warnings of what compiles and is hardly meant.

Purpose: one function of a program, which `compile`, `run` and `check` show.
Non-goals: mistakes (`passes`), and what does not fit a GPU (`memory.capacity`).
"""

from collections.abc import Iterator

from .diagnostics import Diagnostic, Note
from .ir import Program, walk
from .ops import OPS


def advice(program: Program) -> Iterator[Diagnostic]:
    """The warnings for a program."""
    yield from _answers_in_sight(program)


def _answers_in_sight(program: Program) -> Iterator[Diagnostic]:
    """Attention to later tokens, where labels are the tokens that follow."""
    data = program.train.data
    if data.masked is not None:
        return
    for op in walk(program.region.body):
        if op.kind == "attention" and OPS[op.kind].get(op, "mask") == "full":
            yield Diagnostic(
                "W0902",
                "each token is to predict the next one, which it sees",
                op.span,
                "attention to all tokens",
                (Note(data.spans["kind"], "labels are the tokens that follow"),),
                "hide what is to be predicted, `masked = 15%  mask_token = …`, or write `mask=causal`",
            )
            return
