"""Draws: what each dropout of a model is given, and its number among them.

Non-goals: what is dropped (`ops.dropout`).
"""

from collections.abc import Sequence

from ..ir import Arg, Enter, Op, Type, Value
from ..ops.dropout import DRAWS, FORK
from ..syntax.source import Span
from .builder import Writer
from .parameters import OpenRepeat


class Draws:
    """The model's input of draws, which there is from the first dropout on, and its forks for the `repeats` around."""

    def __init__(self, writer: Writer, repeats: Sequence[OpenRepeat]) -> None:
        self._writer, self._repeats = writer, repeats
        self._sites = 0
        self.inputs: tuple[Arg, ...] = ()

    def next(self, span: Span) -> tuple[str, int]:
        """The draws of the dropout that is being read, and its site."""
        if not self.inputs:
            given = self._value(Type("i64", ("batch",)))
            self.inputs = (Arg(given, given.name, Enter.EACH),)
        held = self.inputs[0].value.name
        for repeat in self._repeats:
            repeat.draws = held = repeat.draws or self._forked(repeat, held, span)
        self._sites += 1
        return held, self._sites

    def _forked(self, repeat: OpenRepeat, draws: str, span: Span) -> str:
        """Draws for each iteration, made before the repeat; one iteration's."""
        type = self._writer.types[draws]
        all_ = self._writer.value(f"{repeat.dim}_{DRAWS.name}", type.stacked(repeat.dim))
        repeat.outside.append(Op(FORK.name, (draws,), (all_,), (("repeat", repeat.dim),), span=span))
        own = self._value(type)
        repeat.slices.append(Arg(own, all_.name, Enter.EACH))
        return own.name

    def _value(self, type: Type) -> Value:
        return self._writer.value(DRAWS.name, type)
