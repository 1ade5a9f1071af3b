"""Draws from hypothesis, by the names that writers of random text use.

Non-goals: what is drawn (`random_expressions`, `random_models`).
"""

from collections.abc import Sequence
from typing import TypeVar

from attrs import frozen
from hypothesis import strategies as st

T = TypeVar("T")


@frozen
class Draws:
    """Draws by `draw`, which hypothesis gives."""

    draw: st.DrawFn

    def _one(self, items: Sequence[T]) -> T:
        return self.draw(st.sampled_from(items))

    def _some(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def _maybe(self, one_in: int = 2) -> bool:
        return self._some(1, one_in) == one_in

    def _permuted(self, items: Sequence[T]) -> Sequence[T]:
        return self.draw(st.permutations(items))
