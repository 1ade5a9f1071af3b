"""The words of emitted programs: floats as people write them."""

import pytest

from scalec.compiler.emit.naming import literal

FLOATS = [
    (1e-5, "1e-5"),
    (3e-3, "3e-3"),
    (2.5e-4, "2.5e-4"),
    (0.0025, "0.0025"),
    (0.02, "0.02"),
    (0.004082482904638631, "0.02 / 24**0.5"),
    (33.94112549695428, "1152**0.5"),
    (0.3333333333333333, "0.3333333333333333"),
    (0.0625, "256**-0.5"),
    (1e300, "1e300"),
    (1e-300, "1e-300"),
    (0.125, "0.125"),
    (-1e-8, "-1e-8"),
    (0.0, "0.0"),
    (1.0, "1.0"),
    (1234.5, "1234.5"),
    (10000.0, "10_000.0"),
    (500000.0, "500_000.0"),
    (1e16, "1e16"),
    (1.5e300, "1.5e300"),
]


@pytest.mark.parametrize(("value", "text"), FLOATS)
def test_floats_are_as_people_write_them(value: float, text: str) -> None:
    assert literal(value) == text
    assert eval(text) == value
    assert literal((value,)) == f"({text},)"
