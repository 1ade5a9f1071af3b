"""The demands of norms' gradients on a chip."""

import pytest
import torch

from helpers.kernels.cases_norms import examples
from helpers.kernels.compiled import TUNED, compile_for, recorded
from scalec.runtime.kernels import norm_kernels

MULTIPROCESSORS, REGISTERS = 132, 65536
"""Of an H100, and of each of its multiprocessors."""


@pytest.mark.skipif(
    not TUNED, reason="from Triton 3.8 on they take more registers than their tiles were chosen for"
)
def test_the_programs_of_backward_are_on_the_chip_together() -> None:
    """One that waits for another to end would begin when the others are half done.

    RMS norms leave no place on the chip free.
    """
    with recorded() as launches:
        examples("meta", torch.bfloat16)
    backward = {
        str(launch): launch for launch in launches if launch.kernel is norm_kernels.norm_backward
    }
    for text, launch in backward.items():
        each = compile_for(launch, 90).registers * 32 * launch.options["num_warps"]
        places = MULTIPROCESSORS * (REGISTERS // each)
        assert launch.grid[0] <= places, text
        mean = launch.args[4]
        assert mean is not None or launch.grid[0] == places, text
