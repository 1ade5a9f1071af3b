"""The hardware that a step runs on, as data: a GPU, its links, its host; figures of data sheets, or
measured ones.

Non-goals: seconds of an op (`time.seconds`), memory (`config.gpus`).
"""

# pyright: reportUnusedImport=false

from .description import (
    DATA_SHEETS,
    FLASH,
    KERNELS,
    Attention,
    Collective,
    Hardware,
    Measured,
    Moved,
    Product,
)
from .files import check_hardware, find_shipped_gpu, hardware, load, own_file
