"""Formats are known by files that their own programs write, and no token ids are taken for one of
them.

Where a program is not installed, the file is written by hand from the format's specification.
"""

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import shutil
import sqlite3
import struct
import subprocess
import tarfile
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scalec.formats.data import TEXT, foreign
from scalec.formats.known import Ends, format_of, get_format_words

IDS = np.random.default_rng(0).integers(0, 50_000, 3000)
RAW = IDS.astype(np.uint16).tobytes()
PROSE = "The quick brown fox jumps over the lazy dog. " * 90
ROWS = [{"text": f"line {number}"} for number in range(50)]


def _numpy_zip() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, ids=IDS)
    return buffer.getvalue()


def _numpy(dtype: str) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, IDS.astype(dtype))
    return buffer.getvalue()


def _torch(zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"ids": torch.from_numpy(IDS)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("corpus.txt", PROSE)
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("000.txt")
        member.size = len(PROSE)
        archive.addfile(member, io.BytesIO(PROSE.encode()))
    return buffer.getvalue()


def _safetensors() -> bytes:
    from safetensors.torch import save

    return save({"ids": torch.from_numpy(IDS)})


def _sqlite() -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.execute("create table corpus (text)")
        return database.serialize()


def _wave() -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(8000)
        recording.writeframes(RAW)
    return buffer.getvalue()


def _tfrecord() -> bytes:
    """By TensorBoard's writer, whose checksums are its own."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(RAW)
    return buffer.getvalue()


def _piped(*command: str) -> bytes:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(command, input=PROSE.encode(), capture_output=True, check=True).stdout


def _arrow_stream() -> bytes:
    """The first message as the specification has it: a continuation, a length, a flatbuffer
    with its root's vtable.
    """
    vtable = struct.pack("<HHHHHH", 12, 20, 8, 6, 4, 16)
    table = struct.pack("<i", len(vtable)) + bytes(16)
    flatbuffer = struct.pack("<I", 4 + len(vtable)) + vtable + table
    flatbuffer += bytes(-len(flatbuffer) % 8)
    return b"\xff\xff\xff\xff" + struct.pack("<I", len(flatbuffer)) + flatbuffer + bytes(64)


def _llm_c() -> bytes:
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(IDS)
    return header.tobytes() + RAW


def _lines(rows: list[dict[str, str]], end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in rows).encode()


PICTURE = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(64)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>404</title></head><body>not found</body></html>\n"

FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "int64.npy": ("npy", lambda: _numpy("int64")),
    "uint16.npy": ("npy", lambda: _numpy("uint16")),
    "ids.npz": ("npz", _numpy_zip),
    "corpus.txt.gz": ("gzip", lambda: gzip.compress(PROSE.encode())),
    "ids.bin.gz": ("gzip", lambda: gzip.compress(RAW)),
    "corpus.bz2": ("bzip2", lambda: bz2.compress(PROSE.encode())),
    "corpus.xz": ("xz", lambda: lzma.compress(PROSE.encode())),
    "corpus.zst": ("zstd", lambda: _piped("zstd", "-c")),
    "corpus.lz4": ("lz4", lambda: _piped("lz4", "-c")),
    "two.zst": ("zstd", lambda: _piped("zstd", "-c") + _piped("zstd", "-c", "-19", "--no-check")),
    "sized.lz4": ("lz4", lambda: _piped("lz4", "-c", "--content-size")),
    "corpus.zip": ("zip", _zip),
    "shard.tar": ("tar", _tar),
    "train.parquet": ("parquet", lambda: b"PAR1" + RAW + b"\x10\x00\x00\x00PAR1"),
    "train.feather": ("arrow", lambda: b"ARROW1\0\0" + RAW + b"ARROW1"),
    "old.feather": ("feather", lambda: b"FEA1" + RAW + b"FEA1"),
    "train.arrow": ("arrow", _arrow_stream),
    "train.orc": ("orc", lambda: b"ORC" + RAW + b"\x08\x03\x10\x00ORC\x17"),
    "train.avro": ("avro", lambda: b"Obj\x01\x04\x14avro.codec\x08null\x16avro.schema" + RAW),
    "train.tfrecord": ("tfrecord", _tfrecord),
    "ids.h5": ("hdf5", lambda: b"\x89HDF\r\n\x1a\n" + RAW),
    "ids.db": ("sqlite", _sqlite),
    "ids.pt": ("torch", lambda: _torch(True)),
    "old.pt": ("torch", lambda: _torch(False)),
    "ids.pkl": ("pickle", lambda: pickle.dumps(IDS.tolist())),
    "old.pkl": ("pickle", lambda: pickle.dumps(IDS.tolist(), protocol=2)),
    "model.safetensors": ("safetensors", _safetensors),
    "model.gguf": ("gguf", lambda: b"GGUF\x03\0\0\0" + RAW),
    "corpus.idx": ("megatron", lambda: b"MMIDIDX\0\0" + RAW),
    "fineweb.bin": ("llm.c", _llm_c),
    "paper.pdf": ("pdf", lambda: b"%PDF-1.7\n" + RAW),
    "picture.png": ("png", lambda: PICTURE),
    "speech.wav": ("wave", _wave),
    "lfs.bin": ("lfs", lambda: POINTER),
    "404.txt": ("html", lambda: PAGE),
    "wide.txt": ("utf-16", lambda: PROSE.encode("utf-16")),
    "train.jsonl": ("jsonl", lambda: _lines(ROWS)),
    "windows.jsonl": ("jsonl", lambda: _lines(ROWS, "\r\n")),
    "train.json": ("json", lambda: json.dumps(ROWS, indent=2).encode()),
    "config.json": ("json", lambda: json.dumps({"a": 1}).encode()),
    "large.json": ("json", lambda: json.dumps({"text": "word " * 40_000}).encode()),
}


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The file of a name in `FILES`."""
    name: str = request.param
    (tmp_path / name).write_bytes(FILES[name][1]())
    return tmp_path / name


NAMES = pytest.mark.parametrize("path", FILES, indirect=True)


@NAMES
def test_a_format_is_known_by_what_its_program_writes(path: Path) -> None:
    known = format_of(Ends.from_path(path))
    assert known is not None
    assert known.word == FILES[path.name][0]
    assert get_format_words(path).partition(":")[0] == known.name


@NAMES
@pytest.mark.parametrize("dtype", [TEXT, "uint16", "uint32"])
def test_it_is_neither_text_nor_tokens(path: Path, dtype: str) -> None:
    mistake = foreign(str(path), dtype)
    assert mistake is not None
    assert str(mistake).startswith(f"{path} is ")
    assert mistake.remedy
    assert all(line.strip() for line in mistake.remedy)


def test_a_numpy_array_is_written_raw_by_two_lines_of_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of the remedy are run, and the file that they write has the ids and is no
    longer refused.
    """
    np.save(tmp_path / "ids.npy", IDS)
    monkeypatch.chdir(tmp_path)
    mistake = foreign("ids.npy", "uint16")
    assert mistake is not None
    exec("\n".join(mistake.remedy[1:]))
    assert np.array_equal(np.fromfile("corpus.bin", np.uint16), IDS)
    assert foreign("corpus.bin", "uint16") is None


@pytest.mark.parametrize("name", ["train.jsonl", "train.json"])
def test_the_text_of_json_is_written_by_two_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(FILES[name][1]())
    monkeypatch.chdir(tmp_path)
    mistake = foreign(name, TEXT)
    assert mistake is not None
    exec("\n".join(mistake.remedy[1:]))
    assert Path("corpus.txt").read_text() == "".join(row["text"] + "\n" for row in ROWS)
    assert foreign("corpus.txt", TEXT) is None


WIDER = {"int64": ("uint16", "uint32"), "uint32": ("uint16",), "int32": ("uint16",)}


@pytest.mark.parametrize("written", WIDER)
@pytest.mark.parametrize("vocab", [1000, 50_257, 128_256])
def test_ids_that_are_wider_than_the_plan_says(written: str, vocab: int, tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    np.random.default_rng(0).integers(0, vocab, 4000).astype(written).tofile(path)
    for dtype in WIDER[written]:
        if written == "int64" and dtype == "uint16" and vocab > 2**16:
            continue  # no 16 bits hold them; they are found by the vocabulary
        mistake = foreign(str(path), dtype)
        assert mistake is not None
        assert "by its zeros" in mistake.what


def test_text_is_no_tokens(tmp_path: Path) -> None:
    for text in (
        PROSE,
        "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18",
        "a,b\n1,2\n" * 20,
        "ich möchte über " * 9,
    ):
        (tmp_path / "corpus.txt").write_text(text)
        mistake = foreign(str(tmp_path / "corpus.txt"), "uint16")
        assert mistake is not None
        assert mistake.what == "text"


def test_a_file_that_ends_within_a_token(tmp_path: Path) -> None:
    (tmp_path / "ids.bin").write_bytes(RAW + b"x")
    for dtype in ("uint16", "uint32"):
        mistake = foreign(str(tmp_path / "ids.bin"), dtype)
        assert mistake is not None
        assert "no multiple of a token's" in mistake.what


# ---- files that are what they are taken for

TEXTS = {
    "prose": PROSE,
    "a brace": "{ this is no JSON }\n" * 40,
    "a template": '{{ "text": value }}\n{% for a in b %}',
    "an object, then prose": '{"a": 1}\nis an object of JSON. ' + PROSE,
    "two braces": "{}\n{}\n",
    "latex": "{\\bf Theorem.} " + PROSE,
    "a list": "[1, 2, 3]\n" + PROSE,
    "a bracket": "[x] done\n[ ] open\n",
    "awk": '{ print $1 }\n{ "date" | getline }\n',
    "python": "import os\n\nDATA = {'a': 1}\n",
    "xml": "<?xml version='1.0'?><a/>" + PROSE,
    "a signature's letters": "PK and PAR1 and GIF89a and ORC " + PROSE,
    "umlauts": "ä" * 70_000,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_is_text(name: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXTS[name], encoding=encoding)
    assert foreign(str(tmp_path / "corpus.txt"), TEXT) is None


def test_other_encodings_and_pages_by_name_are_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_text("ich möchte " * 400, encoding="latin-1")
    (tmp_path / "page.html").write_bytes(PAGE)
    for name in ("latin.txt", "page.html"):
        assert foreign(str(tmp_path / name), TEXT) is None


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("vocab", [2, 16, 256, 1000, 50_257, 65_536])
@pytest.mark.parametrize("count", [1, 31, 64, 5000])
def test_tokens_are_tokens(dtype: str, vocab: int, count: int, tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    np.random.default_rng(count).integers(0, vocab, count).astype(dtype).tofile(path)
    assert foreign(str(path), dtype) is None


SHORT = {
    "gzip": b"\x1f\x8b\x08\x00",
    "zstd": b"\x28\xb5\x2f\xfd",
    "lz4": b"\x04\x22\x4d\x18",
    "zip": b"PK\x03\x04",
    "parquet": b"PAR1",
    "arrow": b"\xff\xff\xff\xff",
    "orc": b"ORC\x00",
    "avro": b"Obj\x01",
    "feather": b"FEA1",
    "pickle": b"\x80\x04\x95\x00",
    "jpeg": b"\xff\xd8\xff\xe0",
    "riff": b"RIFF",
    "elf": b"\x7fELF",
    "bzip2": b"BZh9",
    "llm.c": struct.pack("<II", 20240520, 1),
    "pdf": b"%PDF",
}


@pytest.mark.parametrize("name", SHORT)
def test_first_ids_that_are_a_short_magic_number_decide_nothing(name: str, tmp_path: Path) -> None:
    """As 0x8b1f and 0x0008 of a vocabulary of 50,257 would be gzip's, if its data did not have
    to inflate.
    """
    draws, refused = random.Random(name), 0
    path = tmp_path / "ids.bin"
    for _ in range(200):
        ids = [draws.randrange(50_257) for _ in range(500)]
        path.write_bytes(SHORT[name] + struct.pack(f"<{len(ids)}H", *ids))
        refused += foreign(str(path), "uint16") is not None
    assert refused == 0


@settings(max_examples=300, deadline=None)
@given(first=st.binary(min_size=0, max_size=80), data=st.data())
def test_any_bytes_are_looked_at_without_a_fault(first: bytes, data: st.DataObject) -> None:
    magic = data.draw(st.sampled_from([b"", *SHORT.values(), *(make()[:40] for make in _LIGHT)]))
    ends = Ends.from_content(magic + first)
    found = format_of(ends)
    assert found is None or found.name


_LIGHT = (_zip, _tar, _sqlite, _arrow_stream, _llm_c, lambda: PAGE, lambda: _lines(ROWS))
