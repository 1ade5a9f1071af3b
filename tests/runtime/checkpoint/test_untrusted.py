"""Files with anything in them: a checkpoint's index and tensors, weights and their index.

Whatever was changed in them, they are read as what they say, or are an error of one line.
"""

import json
import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from copy import deepcopy
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.checkpoint_index import change_index, get_content
from helpers.small_state import SHAPES, made
from scalec.runtime import HFNames, HFWeight, RunError
from scalec.runtime.checkpoint import saver
from scalec.runtime.checkpoint.export import export
from scalec.runtime.checkpoint.hf_weights import INDEX, Reader
from scalec.runtime.checkpoint.index import to_hashed_json

STEP = "step-000003"
PAYLOAD = "rank-00000.safetensors"
NAMES = HFNames(
    torch.float32,
    {name: HFWeight(f"m.{name}", shape) for name, shape in SHAPES.items()},
    repeats={},
)

DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    *(-1, 0, 1, 7, 2**31, 2**62, 2**63, 2**64, 10**4000, -(10**30), 1.5, float("nan"), True, None),
    *(
        "",
        "\0",
        "a\nb\x1b[2J",
        "\ud800",
        "../x",
        "/etc/passwd",
        ".",
        "x" * 5000,
        "F64",
        "BF16",
        "I8",
        PAYLOAD,
    ),
    *([], {}, [-1], [2**62, 2**62], [2**70, 0], [1] * 100, [0, 2**63], ["0", "8"], DEEP, {"a": 1}),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and a folder of weights in two files."""
    folder = tmp_path_factory.mktemp("good")
    state = made({}, seed=0)
    saver.save(folder, 3, state)
    (folder / "in").mkdir()
    tensors = {f"m.{name}": torch.ones(shape) for name, shape in SHAPES.items()}
    where = {name: f"{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file(
            {name: tensors[name] for name, of in where.items() if of == file}, folder / "in" / file
        )
    (folder / "in" / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": where})
    )
    return folder


def _load(folder: Path) -> None:
    saver.load(folder / STEP, made({}, seed=1))


def _export(folder: Path) -> None:
    export(folder / STEP, folder / "out", NAMES)


def _init(folder: Path) -> None:
    Reader(folder / "in", NAMES).fill(made({}, seed=1))


def _line(read: Callable[[Path], None], folder: Path) -> str:
    """The error, which is a line that can be printed; "" if there is none."""
    line = ""
    try:
        read(folder)
    except RunError as error:
        line = str(error)
    assert line.isprintable()
    return line


def _changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Some bytes are others, more, or fewer; mostly of the beginning, where headers are."""
    mutable = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(min(len(mutable), draw.choice([12, 400, 1 << 20])))
        change = draw.randrange(4)
        if change == 0:
            mutable[at] ^= 1 << draw.randrange(8)
        elif change == 1:
            mutable[at] = draw.choice(b'\0\xff"{}[]-09e,')
        elif change == 2:
            del mutable[at : at + draw.randint(1, 60)]
        else:
            mutable[at:at] = draw.choice([b"-", b"9" * 30, b"{", b"]", b'"', b"\0", b"null"])
        mutable = mutable or bytearray(b"\0")
    return bytes(mutable)


def _changed_json(data: bytes, draw: random.Random) -> bytes:
    """A value anywhere in it, a key or an element is another, or gone."""
    root = [json.loads(data)]
    for _ in range(draw.randint(1, 2)):
        holder, key = _drawn(root, draw)
        change = draw.randrange(5)
        if change == 0 and holder is not root:
            del holder[key]
        elif change == 1 and isinstance(holder, dict):
            holder[draw.choice(["", "\0", "../x", "optimizer/step", "\ud800", "m.up"])] = (
                holder.pop(key)
            )
        elif change == 2 and isinstance(holder, list) and holder is not root:
            holder.append(holder[key])
        else:
            holder[key] = deepcopy(draw.choice(HOSTILE))
    return json.dumps(root[0]).encode()


def _changed_content(data: bytes, draw: random.Random) -> bytes:
    """An index of a checkpoint, likewise, with the right hash where it is an object still."""
    content = _changed_json(json.dumps(get_content(data)).encode(), draw)
    read = json.loads(content)
    return to_hashed_json(read) if isinstance(read, dict) and read else content


def _drawn(root: list[Any], draw: random.Random) -> tuple[Any, Any]:
    """A list or object somewhere in it, and one of its indices or keys."""
    holder, key = root, 0
    while (inner := holder[key]) and isinstance(inner, dict | list) and draw.random() < 0.85:
        holder, key = inner, draw.choice([*inner] if isinstance(inner, dict) else range(len(inner)))
    return holder, key


def _changed_header(data: bytes, draw: random.Random) -> bytes:
    """The JSON at the beginning of a file of tensors."""
    stop = 8 + int.from_bytes(data[:8], "little")
    header = _changed_json(data[8:stop], draw)
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[stop:]


def _stamped(folder: Path) -> None:
    """The index has the size and the hash of the tensors' file as it is."""
    data = (folder / STEP / PAYLOAD).read_bytes()
    stamp = {"bytes": len(data), "blake2b": blake2b(data, digest_size=32).hexdigest()}
    change_index(
        folder / STEP / "index.json", lambda index: index["files"].update({PAYLOAD: stamp})
    )


CHECKPOINT = (_load, _export)
KINDS: dict[
    str, tuple[str, Callable[[bytes, random.Random], bytes], tuple[Callable[[Path], None], ...]]
] = {
    "index_bytes": (f"{STEP}/index.json", _changed_bytes, CHECKPOINT),
    "index": (f"{STEP}/index.json", _changed_content, CHECKPOINT),
    "tensors_bytes": (f"{STEP}/{PAYLOAD}", _changed_bytes, CHECKPOINT),
    "tensors": (f"{STEP}/{PAYLOAD}", _changed_header, CHECKPOINT),
    "weights_bytes": ("in/0.safetensors", _changed_bytes, (_init,)),
    "weights": ("in/0.safetensors", _changed_header, (_init,)),
    "weights_index_bytes": (f"in/{INDEX}", _changed_bytes, (_init,)),
    "weights_index": (f"in/{INDEX}", _changed_json, (_init,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_changed_is_read_or_a_line(kind: str, good: Path, tmp_path: Path) -> None:
    file, change, reads = KINDS[kind]
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    data, lines = (good / file).read_bytes(), 0
    for seed in range(60):
        (tmp_path / file).write_bytes(change(data, random.Random(seed)))
        if file.endswith(PAYLOAD):
            _stamped(tmp_path)
        for read in reads:
            try:
                lines += bool(_line(read, tmp_path))
            except BaseException as error:
                raise AssertionError(
                    f"{kind}, seed {seed}, {read.__name__}: {error!r:.300}"
                ) from error
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert lines > 20, "the changes change nothing"


# ---- what no change of a few bytes makes


def _index(change: Callable[[Any], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        change_index(folder / STEP / "index.json", change)

    return damage


def _renamed(index: Any, name: str) -> None:
    index["files"] = {name: index["files"].pop(PAYLOAD)}
    for tensor in index["tensors"].values():
        for box in tensor["boxes"]:
            box["file"] = name


def _huge(index: Any, shape: list[int]) -> None:
    index["tensors"]["up"]["shape"] = shape
    index["tensors"]["up"]["boxes"][0].update(offset=[0] * len(shape), size=shape)


def _instead(file: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / file).unlink()
        make(folder / file)

    return damage


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _nothing_stamped(folder: Path) -> None:
    (folder / STEP / PAYLOAD).write_bytes(b"")
    _stamped(folder)


def _mapped(value: object) -> Callable[[Path], object]:
    return lambda folder: (folder / "in" / INDEX).write_text(json.dumps({"weight_map": value}))


NOT_OURS = "index.json is damaged, or no index of a checkpoint"
NO_INDEX = f"{INDEX} is damaged, or no index of weights"
CASES: dict[str, tuple[Callable[[Path], object], Callable[[Path], None], str]] = {
    "endless": (
        _instead(f"{STEP}/index.json", lambda path: path.symlink_to("/dev/zero")),
        _load,
        "it is no file",
    ),
    "pipe": (_instead(f"{STEP}/index.json", os.mkfifo), _load, "it is no file"),
    "sparse": (_instead(f"{STEP}/index.json", _sparse), _load, "it is larger than any index"),
    "pipe_of_tensors": (_instead(f"{STEP}/{PAYLOAD}", os.mkfifo), _load, "it is no file"),
    "no_header": (
        _nothing_stamped,
        _load,
        f"{PAYLOAD} is no file of tensors, though its hash is right",
    ),
    "nul_file": (_index(lambda index: _renamed(index, "a\0b")), _load, NOT_OURS),
    "parent": (_index(lambda index: _renamed(index, "..")), _load, NOT_OURS),
    "newline": (
        _index(lambda index: index["tensors"].update({"a\nb": index["tensors"]["up"]})),
        _load,
        "has `a\\nb`, which the plan has not",
    ),
    "huge": (
        _index(lambda index: _huge(index, [1 << 55])),
        _export,
        f"{PAYLOAD} has no `up` that is float32 [",
    ),
    "overflow": (_index(lambda index: _huge(index, [1 << 40, 1 << 40])), _export, NOT_OURS),
    "other_shape": (
        _index(lambda index: _huge(index, [12, 7])),
        _export,
        "`up`: the plan's shapes are others",
    ),
    "lacking": (_index(lambda index: index["tensors"].pop("up")), _export, f"{STEP} lacks `up`"),
    "others": (
        _index(lambda index: index["tensors"].update(bias=index["tensors"]["up"])),
        _export,
        "has `bias`, which the plan has not",
    ),
    "no_map": (_mapped(["0.safetensors"]), _init, NO_INDEX),
    "no_names": (_mapped({"m.up": 1}), _init, NO_INDEX),
    "no_object": (lambda folder: (folder / "in" / INDEX).write_text("[]"), _init, NO_INDEX),
    "up": (
        _mapped({"m.up": "../in/0.safetensors"}),
        _init,
        "names `../in/0.safetensors`, which cannot be a file in",
    ),
    "absolute": (_mapped({"m.up": "/etc/passwd"}), _init, "names `/etc/passwd`, which cannot be"),
    "nul": (_mapped({"m.up": "\0"}), _init, "names `\\x00`, which cannot be"),
    "pipe_of_weights": (_instead("in/0.safetensors", os.mkfifo), _init, "it is no file"),
    "folder_of_weights": (_instead("in/0.safetensors", Path.mkdir), _init, "it is no file"),
    "twice": (
        lambda folder: shutil.copy(
            folder / "in" / "0.safetensors", folder / "in" / "1.safetensors"
        ),
        _init,
        "more than one file has `m.",
    ),
}


@pytest.mark.parametrize(("damage", "read", "message"), CASES.values(), ids=CASES)
def test_each_is_told(
    damage: Callable[[Path], object],
    read: Callable[[Path], None],
    message: str,
    good: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    damage(tmp_path)
    assert message in _line(read, tmp_path)


def test_files_may_be_links_and_lie_in_a_folder_below(good: Path, tmp_path: Path) -> None:
    """As those of Hugging Face's cache."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "in"
    (folder / "0.safetensors").rename(tmp_path / "blob")
    (folder / "0.safetensors").symlink_to("../blob")
    (folder / "below").mkdir()
    (folder / "1.safetensors").rename(folder / "below" / "1.safetensors")
    (folder / INDEX).write_text((folder / INDEX).read_text().replace("1.safe", "below/1.safe"))
    assert not _line(_init, tmp_path)


def test_a_disk_that_takes_no_more_is_told(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        line = _line(_export, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert re.match(
        rf"cannot write {re.escape(str(tmp_path))}/\.out\.\w+/model\.safetensors: ", line
    )
