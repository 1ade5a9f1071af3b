"""Which calls kernels serve, what the log says of the others, and what starts at all."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scalec.runtime.kernels import Tile
from scalec.runtime.kernels.launching import blocks, launch, matrix, next_power_of_two, tile_for

TILES = {8: Tile(rows=1, warps=4)}


class Op:
    """Stands for an op."""


def _on_a_gpu(dtype: torch.dtype) -> Any:
    return SimpleNamespace(is_cuda=True, is_meta=False, dtype=dtype)


def test_a_gpu_has_kernels_for_three_element_types_and_the_sizes_of_the_table() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert (
            tile_for(Op(), TILES, 8, _on_a_gpu(dtype), None, _on_a_gpu(torch.float32)) is TILES[8]
        )


def test_the_log_says_once_for_each_op_and_reason_that_torch_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        assert tile_for(Op(), TILES, 8, _on_a_gpu(torch.float32), _on_a_gpu(torch.float64)) is None
        assert tile_for(Op(), TILES, 9, _on_a_gpu(torch.float32)) is None
    assert [record.getMessage() for record in caplog.records] == [
        "Op: plain torch instead of a kernel, for torch.float64",
        "Op: plain torch instead of a kernel, for size 9, which has no tile",
    ]


def test_on_the_cpu_torch_serves_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert tile_for(Op(), TILES, 8, torch.ones(8)) is None
    assert not caplog.records


def test_an_empty_grid_starts_nothing() -> None:
    started: list[Any] = []
    kernel: Any = {(2, 1): lambda *args, **options: started.append((args, options))}
    launch(kernel, (0, 3), 1, warps=4)
    launch(kernel, (2, 1), 1, warps=4, stages=3, WIDTH=8)
    assert started == [((1,), {"num_warps": 4, "num_stages": 3, "WIDTH": 8})]


def test_matrices_are_views_where_rows_are_evenly_spaced() -> None:
    x = torch.arange(48).view(2, 3, 8)
    for view, copied in (
        (x, False),
        (x[..., 2:6], False),
        (x[:, ::2], True),
        (x.mT, True),
        (x[..., ::2], True),
    ):
        width = view.shape[-1]
        rows = matrix(view, width)
        assert torch.equal(rows, view.reshape(-1, width))
        assert (rows.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()) == copied
        assert rows.stride(1) == 1


def test_blocks_and_powers_of_two() -> None:
    assert [blocks(size, 4) for size in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [next_power_of_two(size) for size in (1, 2, 3, 4, 4097)] == [1, 2, 4, 4, 8192]


def test_the_runtime_needs_no_triton() -> None:
    script = "import sys; sys.modules['triton'] = None; import scalec.runtime"
    result = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
