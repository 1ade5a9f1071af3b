"""Corpora of many and of large files: descriptors are bounded, and nothing is read that is not
asked for.
"""

import os
from pathlib import Path

import torch

from scalec.runtime.data.files import MOST_OPEN, TokenFiles
from scalec.runtime.data.mixture import Stream


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_are_bounded_and_closed(tmp_path: Path) -> None:
    paths = []
    for number in range(3 * MOST_OPEN):
        (path := tmp_path / f"{number:03}").write_bytes(bytes([number % 256] * 10))
        paths.append(str(path))
    before = _open_files()
    stream = Stream(paths, torch.uint8, 15)
    assert _open_files() == before
    for _ in range(2):
        for number in range(stream.windows):
            start = 15 * number
            assert stream.window(number).tolist() == [
                (at // 10) % 256 for at in range(start, start + 15)
            ]
    assert _open_files() == before + MOST_OPEN
    del stream
    assert _open_files() == before


def test_a_file_larger_than_memory_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    """A hole of 4 TiB."""
    path, size = tmp_path / "large.bin", 1 << 42
    with path.open("wb") as file:
        file.truncate(size)
        os.pwrite(file.fileno(), b"\x01\x02\x03\x04", size - 4)
    stream = Stream([str(path)], torch.uint16, 4)
    assert stream.tokens == size // 2
    assert stream.window(stream.windows - 1).tolist() == [0, 0, 0x0201, 0x0403]
    assert TokenFiles([str(path)], torch.uint32).read(0, size // 4 - 2, size // 4).tolist() == [
        0,
        0x04030201,
    ]
