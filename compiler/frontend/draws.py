"""The seeds of dropout: an input of the model, and its forks for the repeats around a dropout."""

from collections.abc import Sequence

from ..ir import BATCH, Arg, Enter, Op, Type, Value
from ..ops.dropout import DRAWS, FORK
from ..syntax.source import Span
from .builder import ModelBuilder
from .scope import OpenRepeat


class Draws:
    """The model's input of draws, which there is from the first dropout on, and its forks for
    the `repeats` around.
    """

    def __init__(self, builder: ModelBuilder, repeats: Sequence[OpenRepeat]) -> None:
        """`repeats` are the open ones at any time."""
        self._builder, self._repeats = builder, repeats
        self._sites = 0
        self.inputs: tuple[Arg, ...] = ()

    def next(self, span: Span) -> tuple[str, int]:
        """The draws of the dropout that is being read, and its site."""
        if not self.inputs:
            value = self._value(Type("i64", (BATCH,)))
            self.inputs = (Arg(value, value.name, Enter.EACH),)
        draws = self.inputs[0].value.name
        for repeat in self._repeats:
            if not repeat.draws:
                self._fork(repeat, draws, span)
            draws = repeat.draws
        self._sites += 1
        return draws, self._sites

    def _fork(self, repeat: OpenRepeat, draws: str, span: Span) -> None:
        """Writes the draws of each iteration before the repeat, which takes slices of them."""
        type = self._builder.types[draws]
        all_ = self._builder.value(f"{repeat.dim}_{DRAWS.name}", type.stack_along(repeat.dim))
        repeat.outside.append(
            Op(FORK.name, (draws,), (all_,), (("repeat", repeat.dim),), span=span)
        )
        slice = self._value(type)
        repeat.slices.append(Arg(slice, all_.name, Enter.EACH))
        repeat.draws = slice.name

    def _value(self, type: Type) -> Value:
        return self._builder.value(DRAWS.name, type)
