"""`.venv/bin/python benchmarks/saves.py`: the stall of a save beside training, beside a whole save, on one thread.

The stall is the copy to host memory; the whole save hashes, writes and syncs it too.  Bar: 5% of its CPU time.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import torch

from scalec.runtime.checkpoint import background, saver
from scalec.runtime.checkpoint.files import Disk
from scalec.runtime.state.shards import Box

SIDE, TENSORS, TIMES = 4096, 12, 3


def main() -> None:
    """Prints the least of some times."""
    torch.set_num_threads(1)
    own = {f"w{i}": Box(f"w{i}", (SIDE, SIDE), (0, 0), torch.randn(SIDE, SIDE), own=True) for i in range(TENSORS)}
    memory = background.host_memory(own)
    background.copied(own, memory)  # the first touches the memory
    copy = min(_seconds(lambda: background.copied(own, memory)) for _ in range(TIMES))
    with TemporaryDirectory() as folder:
        saves = [partial(saver.write, Path(folder), step, own, {}, Disk()) for step in range(TIMES)]
        save = min(map(_seconds, saves))
    size = sum(each.nbytes for each in memory.values())
    print(f"{size / 2**20:.0f} MiB: the copy {copy:.2f} s of CPU, a whole save {save:.2f} s: {copy / save:.1%}")


def _seconds(do: Callable[[], object]) -> float:
    began = process_time()
    do()
    return process_time() - began


if __name__ == "__main__":
    main()
