"""Times and tiles that `benchmarks/tune_kernels.py` writes and `benchmarks/gpu.py` reads,
without a GPU.
"""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from helpers.kernels.cases import MODULES
from helpers.kernels.compiled import recorded
from helpers.programs import import_module
from scalec.compiler.analysis.kernel_tiles import CHIPS, KERNELS
from scalec.runtime import kernels
from scalec.runtime.kernels import Tile

SCRIPT = Path(__file__).parents[3] / "benchmarks/tune_kernels.py"
FIRST = {
    "Attention": kernels.Blocks(*(kernels.Block(32, 64, warps=4, stages=2) for _ in range(3))),
    "GroupedLinear": kernels.Products(
        *(kernels.Product(64, 64, 32, warps=2, stages=2) for _ in range(2))
    ),
    # Of few rows it takes no more warps than have 16 bytes each.
    "Rope": Tile(rows=16, warps=2),
    "RopePair": Tile(rows=16, warps=2),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_so() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: tiles are measured on a GPU, and this machine has none\n",
    )


def test_the_table_is_sorted_and_reads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    tuning = import_module(SCRIPT)
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


def test_what_is_timed_are_the_kernels_with_their_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's, which attention takes where torch has some."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    tuning = import_module(SCRIPT)
    monkeypatch.setattr(tuning, "DEVICE", "meta")
    for name, subject in tuning.SUBJECTS.items():
        size = subject.sizes[0]
        with recorded() as launches:
            subject.call(kernels, size, FIRST.get(name, Tile(rows=1, warps=2, columns=256)))()
        warps = {4} if name == "Attention" else {2}
        assert {launch.options["num_warps"] for launch in launches} == warps, name


@pytest.mark.parametrize("chip", CHIPS.values())
def test_benchmarks_have_the_tiles_of_programs(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every class, though a chip's own table has few of them."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    gpu = import_module(SCRIPT.with_name("gpu.py"))
    monkeypatch.setattr(gpu, "chip", lambda: chip)
    for kernel in KERNELS.values():
        assert gpu.tiles(kernels, kernel.name, 128).keys() == {128}


@pytest.mark.parametrize("module", MODULES)
def test_each_kernel_has_a_name_by_which_a_profile_groups_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    steps = import_module(SCRIPT.with_name("gpu_steps.py"))
    with recorded() as launches:
        importlib.import_module(f"helpers.kernels.{module}").examples("meta", torch.bfloat16)
    assert not [
        name for launch in launches if steps.group_of(name := launch.kernel.__name__) == "others"
    ]
