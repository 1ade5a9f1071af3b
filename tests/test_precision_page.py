"""The page of number formats: its figures are torch's."""

import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs" / "precision.md").read_text(encoding="utf-8")
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8 e4m3": torch.float8_e4m3fn,
    "fp8 e5m2": torch.float8_e5m2,
}
ROWS = dict(re.findall(r"^\| (\w[\w ]*?) \| (\d.*) \|$", PAGE, re.MULTILINE))


@pytest.mark.parametrize("name", DTYPES)
def test_a_format_has_its_figures(name: str) -> None:
    limits = torch.finfo(DTYPES[name])
    bits, fields, largest, smallest, step, *_ = ROWS[name].split(" | ")
    sign, exponent, mantissa = map(int, fields.split(", "))
    assert int(bits) == limits.bits == sign + exponent + mantissa
    assert 2.0**-mantissa == limits.eps
    assert [largest, smallest, step] == [
        f"{value:.1e}" for value in (limits.max, limits.smallest_normal, limits.eps)
    ]


def test_tf32_has_the_range_of_fp32_and_the_mantissa_of_fp16() -> None:
    _, fields, largest, smallest, step, *_ = ROWS["tf32"].split(" | ")
    assert fields == "1, 8, 10"
    assert [largest, smallest] == ROWS["fp32"].split(" | ")[2:4]
    assert step == ROWS["fp16"].split(" | ")[4]
