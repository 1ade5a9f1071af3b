"""`.venv/bin/python benchmarks/saves.py`: the stall of a save beside training, beside a whole save,
on one thread.

The stall is the copy to host memory; the whole save hashes, writes and syncs it too.  Bar: 5% of
its CPU time.  Told besides: the rate at which a thread hashes, in CPU time, and that of the disk,
in seconds, with a sync at the end; and how much faster a thread for each core hashes several files,
as at a resume on fewer ranks, and for an export.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, process_time
from typing import Any, cast

import torch

from scalec.runtime.checkpoint import host_copy, saver
from scalec.runtime.checkpoint.files import Disk, write_durably
from scalec.runtime.state.shards import Box

SIDE, TENSORS, TIMES = 4096, 12, 3


def main() -> None:
    """Prints the least of some times."""
    torch.set_num_threads(1)
    own = {
        f"w{i}": Box(f"w{i}", (SIDE, SIDE), (0, 0), torch.randn(SIDE, SIDE), is_own=True)
        for i in range(TENSORS)
    }
    memory, _ = host_copy.host_memory(own)
    host_copy.copy_boxes(own, memory)  # the first touches the memory
    copy = min(_seconds(lambda: host_copy.copy_boxes(own, memory)) for _ in range(TIMES))
    data = [
        memoryview(cast(Any, each.view(-1).view(torch.uint8).numpy())) for each in memory.values()
    ]
    hashing = min(_seconds(lambda: [*map(_hash, data)]) for _ in range(TIMES))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        alone = min(_seconds(lambda: [*map(_hash, data)], monotonic) for _ in range(TIMES))
        together = min(_seconds(lambda: [*pool.map(_hash, data)], monotonic) for _ in range(TIMES))
    with TemporaryDirectory() as folder:
        saves = [partial(saver.write, Path(folder), step, own, {}, Disk()) for step in range(TIMES)]
        save = min(map(_seconds, saves))
        files = [
            partial(write_durably, Path(folder, f"{step}"), data, Disk()) for step in range(TIMES)
        ]
        writing = min(_seconds(each, monotonic) for each in files)
    size = sum(each.nbytes for each in memory.values())
    print(
        f"{size / 2**20:.0f} MiB: the copy {copy:.2f} s of CPU, a whole save {save:.2f} s:"
        f" {copy / save:.1%}"
    )
    rates = [f"{size / each / 1e9:.2f} GB/s" for each in (hashing, writing)]
    print(
        f"of that hashing {hashing:.2f} s, {rates[0]}; this disk writes {rates[1]};"
        f" {os.cpu_count()} threads hash in"
        f" {together / alone:.2f} of one's time"
    )


def _hash(data: memoryview) -> str:
    return blake2b(data, digest_size=32).hexdigest()


def _seconds(do: Callable[[], object], clock: Callable[[], float] = process_time) -> float:
    began = clock()
    do()
    return clock() - began


if __name__ == "__main__":
    main()
