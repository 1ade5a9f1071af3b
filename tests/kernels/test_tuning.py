"""The table that `benchmarks/tune_kernels.py` writes reads back; where there is no GPU it says so."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from oracle.harness import imported
from scalec.runtime.kernels import Tile

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks/tune_kernels.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_so() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: tiles are measured on a GPU, and this machine has none\n")


def test_the_table_is_sorted_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    tuning = imported(SCRIPT)
    tile = tuning.arguments(Tile(rows=1, warps=8))
    assert tile == {"rows": 1, "warps": 8}
    blocks = {"forward": {"queries": 128, "keys": 64}, "keys": {"queries": 64, "keys": 64}}
    tables = {
        "sm_100": {"RMSNorm": {"4096": tile, "128": {"rows": 16, "warps": 4}}},
        "sm_90": {"RMSNorm": {"64": tile}, "Attention": {"128": blocks}},
    }
    text = tuning.written(tables)
    assert tomllib.loads(text) == tables
    assert [line for line in text.splitlines() if line.startswith(("[", "1", "4", "6"))] == [
        "[sm_90.Attention]",
        "128 = { forward = { queries = 128, keys = 64 }, keys = { queries = 64, keys = 64 } }",
        "[sm_90.RMSNorm]",
        "64 = { rows = 1, warps = 8 }",
        "[sm_100.RMSNorm]",
        "128 = { rows = 16, warps = 4 }",
        "4096 = { rows = 1, warps = 8 }",
    ]
