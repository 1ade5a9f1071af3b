"""Torch's metadata, a pickle: read as torch reads it, and never run, whatever it holds."""

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from scalec.runtime import RunError
from scalec.runtime.checkpoint.torch_metadata import parse

dcp: Any = checkpoint  # its types are partial


@pytest.fixture(name="written")
def _written(tmp_path: Path) -> bytes:
    state = {
        "a": torch.zeros(3, 4),
        "b": {"c": torch.zeros((), dtype=torch.bfloat16), "rate": 0.1},
        "n": torch.arange(3),
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    return (tmp_path / "saved" / ".metadata").read_bytes()


def test_tensors_are_those_that_torch_finds(written: bytes) -> None:
    ours, theirs = parse(written), pickle.loads(written)
    kept = {key: each for key, each in theirs.state_dict_metadata.items() if key in ("a", "b.c")}
    assert ours.state_dict_metadata == kept
    assert all(
        isinstance(each, TensorStorageMetadata) for each in ours.state_dict_metadata.values()
    )
    assert ours.storage_data == theirs.storage_data


class _Runs:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _hostile(canary: str) -> list[bytes]:
    touch = f"open({canary!r}, 'w')"
    objects = [
        _Runs(os.system, f"touch {canary}"),
        _Runs(eval, touch),
        _Runs(exec, touch),
        _Runs(open, canary, "w"),
    ]
    objects += [
        Metadata({}, storage_data=each)
        for each in (_Runs(eval, touch), _Runs(Path.touch, Path(canary)))
    ]
    inside = (b"torch.distributed.checkpoint.metadata", b"Metadata.__init__.__globals__")
    named = [
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"\x80\x04" + b"".join(b"\x8c" + bytes([len(each)]) + each for each in inside) + b"\x93.",
        b"ctorch\nload\n(S'" + canary.encode() + b"'\ntR.",
        b"cbuiltins\n__import__\n(S'os'\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n.",
    ]
    return [pickle.dumps(each, protocol) for each in objects for protocol in (0, 2, 4)] + named


def test_a_pickle_that_names_anything_else_is_refused(tmp_path: Path) -> None:
    for data in _hostile(str(tmp_path / "canary")):
        with pytest.raises(
            RunError, match=r"which is none of torch's own metadata: it is not read"
        ):
            parse(data)
    assert not [*tmp_path.iterdir()]


def test_numbers_in_it_take_no_memory_and_no_file_lies_elsewhere(written: bytes) -> None:
    for data in (
        b"\x80\x04Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\x00\x00\x00\x00.",
        b"\x80\x04N.",
        b"",
        written[:-9],
    ):
        with pytest.raises(
            RunError, match=r"is damaged, or no metadata of torch\.distributed\.checkpoint"
        ):
            parse(data)
    name = next(iter(pickle.loads(written).storage_data.values())).relative_path.encode()
    for other in (b"/etc/passwd", b"../../x.pt"):
        with pytest.raises(RunError, match="is damaged"):
            parse(written.replace(name, other[: len(name)].ljust(len(name), b"x")))


def test_whatever_it_holds_is_read_or_a_line(written: bytes) -> None:
    read = 0
    for seed in range(400):
        chosen, data = random.Random(seed), bytearray(written)
        for _ in range(chosen.randint(1, 4)):
            at = chosen.randrange(len(data))
            data[at : at + chosen.randint(0, 2)] = chosen.randbytes(chosen.randint(0, 2))
        try:
            parse(bytes(data))
            read += 1
        except RunError:
            pass
    assert 0 < read < 400
