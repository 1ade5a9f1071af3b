"""Files of training data: finds the files that patterns match, and the ones that are no text, or no
raw token ids.

`data text` reads the bytes of a file and `data tokens` its numbers, whatever they are: a file of
another format would train a model on headers, quotes and compressed bytes, and nothing would say
so.
"""

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import iglob
from itertools import islice

from .known import FETCH, Ends, Format, format_of, text_of

WIDTHS = {"uint8": 1, "uint16": 2, "uint32": 4}
"""Bytes of a token by its type; tokens of text are bytes."""

TEXT = "uint8"

_FEWEST = 64
"""The least numbers of a file that is judged by them."""


_LARGE = 4096
"""The least bytes of a `.bin` without text that is taken for token ids."""


@dataclass(frozen=True)
class Foreign:
    """A file of another format than a plan says.

    what    words for its format
    wanted  words for the format that the plan says
    remedy  what to do, line by line
    """

    path: str
    what: str
    wanted: str
    remedy: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path} is {self.what}, not {self.wanted}"


def files_of(pattern: str, most: int | None = None) -> list[str]:
    """The files with something in them that a pattern matches, sorted; of the first `most`
    matches alone.
    """
    matches = islice(iglob(pattern, recursive=True), most)
    return sorted(path for path in matches if os.path.isfile(path) and os.path.getsize(path) > 0)


def folders_of(pattern: str) -> list[str]:
    """The folders that a pattern matches, sorted."""
    return sorted(path for path in iglob(pattern, recursive=True) if os.path.isdir(path))


def address(pattern: str) -> str:
    """The scheme of a pattern that is an address, as `hf` of `hf://datasets/…`; "" of a path."""
    scheme, separator, _ = pattern.partition("://")
    return scheme if separator and scheme.isalnum() else ""


def address_advice(pattern: str) -> str:
    """The advice for a pattern that is an address."""
    return (
        f"`{pattern}` is an address ({address(pattern)}), not a path: download its files, and"
        " name their paths"
    )


def foreign(path: str, dtype: str) -> Foreign | None:
    """The reason why a file holds no text, for `TEXT`, or no raw token ids of a type.  OSError."""
    ends = Ends.from_path(path)
    if dtype == TEXT:
        reason, wanted = _no_text(path, ends), "plain text"
    else:
        reason, wanted = _no_tokens(path, ends, dtype), f"raw token ids of {dtype}"
    if reason is None:
        return None
    what, remedy = reason
    return Foreign(path, what, wanted, remedy)


_Found = tuple[str, tuple[str, ...]]
"""The words for a file of another format, and the remedy."""


def _no_text(path: str, ends: Ends) -> _Found | None:
    file_format, suffix = format_of(ends), os.path.splitext(path)[1].lower()
    if file_format and not (file_format.word == "html" and suffix in (".html", ".htm")):
        return file_format.name, _to_text(path, file_format)
    separator = {".csv": ",", ".tsv": "\t"}.get(suffix, "")
    if separator and separator in text_of(ends).partition("\n")[0]:
        return "a table (CSV)", (_column("pandas.read_csv", path),)
    if suffix == ".bin" and ends.size >= _LARGE and not text_of(ends):
        return "binary data", ("read a file of token ids with `data tokens { … }`",)
    return None


def _to_text(path: str, file_format: Format) -> tuple[str, ...]:
    """How a file of a format becomes text."""
    if unpack := _unpacking(path, file_format):
        return (unpack,)
    match file_format.word:
        case "jsonl":
            lines = f'(json.loads(line)["text"] + "\\n" for line in open({path!r}))'
            return (
                "write the text of its lines to a file:",
                "import json",
                f'open("corpus.txt", "w").writelines({lines})',
            )
        case "json":
            records = f'(each["text"] + "\\n" for each in json.load(open({path!r})))'
            return (
                "write its text to a file, for instance:",
                "import json",
                f'open("corpus.txt", "w").writelines({records})',
            )
        case "parquet" | "arrow" | "feather" | "orc":
            reader = {"arrow": "feather"}.get(file_format.word, file_format.word)
            return (_column(f"pandas.read_{reader}", path),)
        case "utf-16":
            return (f"convert it: iconv -f utf-16 -t utf-8 {shlex.quote(path)} > corpus.txt",)
        case "npy" | "npz" | "megatron" | "llm.c":
            return (
                "token ids are read by `data tokens { … }`, from a file of nothing but raw ids",
            )
        case _:
            return ("write its text to a file of its own",)


def _column(reader: str, path: str) -> str:
    return (
        'write its column of text to a file: open("corpus.txt",'
        f' "w").write("\\n".join({reader}({path!r})["text"]))'
    )


def _no_tokens(path: str, ends: Ends, dtype: str) -> _Found | None:
    if file_format := format_of(ends):
        return file_format.name, _to_tokens(path, file_format, dtype)
    if len(text_of(ends)) >= _FEWEST // 2:
        tokenise = (
            f'numpy.array(ids, "{dtype}").tofile("corpus.bin") writes the ids that a tokenizer'
            " gives"
        )
        return "text", (tokenise, "to train on the bytes of text, write `data text { … }`")
    if ends.size % WIDTHS[dtype]:
        what = f"{ends.size:,} bytes long, which is no multiple of a token's {WIDTHS[dtype]}"
        return what, ("write it anew, or set `dtype` to the type that it was written in",)
    if wide := _wide(ends, dtype):
        raw = f'numpy.fromfile({path!r}, "{wide}").astype("{dtype}").tofile("corpus.bin")'
        other = ", or set `dtype = uint32`" if wide == "uint32" else ""
        return f"made of ids of {wide}, by its zeros", (f"write narrower ids: {raw}{other}",)
    return None


def _wide(ends: Ends, dtype: str) -> str:
    """The wider type that numbers seem to have been written in: the upper parts of each are 0, or
    nearly so; else "".
    """
    whole = len(ends.first) // 8 * 8
    numbers = memoryview(ends.first[:whole]).cast("H" if dtype == "uint16" else "I").tolist()
    if len(numbers) < _FEWEST:
        return ""
    step = 8 // WIDTHS[dtype]
    has_upper = any(any(numbers[place::step]) for place in range(1, step))
    if any(numbers[::step]) and not has_upper:
        return "int64"
    low, high = max(numbers[::2]), max(numbers[1::2])
    return "uint32" if dtype == "uint16" and low > 255 and high < 16 else ""


def _to_tokens(path: str, file_format: Format, dtype: str) -> tuple[str, ...]:
    """How a file of a format becomes raw token ids."""
    if unpack := _unpacking(path, file_format):
        return (unpack,)
    raw = f'.astype("{dtype}").tofile("corpus.bin")'
    match file_format.word:
        case "npy":
            return "write the raw ids with numpy:", "import numpy", f"numpy.load({path!r}){raw}"
        case "npz":
            return (
                "write the raw ids with numpy:",
                "import numpy",
                f'numpy.load({path!r})["arr_0"]{raw}',
            )
        case "llm.c":
            width = f'"{dtype}", offset=1024'
            return (
                "leave its header out:",
                "import numpy",
                f"numpy.fromfile({path!r}, {width}){raw}",
            )
        case "megatron":
            return (
                f"its ids are in {os.path.splitext(path)[0]}.bin, one after the other: name"
                " that file",
            )
        case "torch":
            return (
                "write the raw ids with numpy:",
                "import torch",
                f"torch.load({path!r}).numpy(){raw}",
            )
        case _:
            return (
                "write its token ids as raw numbers: numpy.array(ids,"
                f' "{dtype}").tofile("corpus.bin")',
            )


_UNPACKED = {
    "gzip": "gzip -dk",
    "bzip2": "bzip2 -dk",
    "xz": "xz -dk",
    "zstd": "zstd -d",
    "lz4": "lz4 -d",
    "zip": "unzip",
    "7z": "7z x",
    "rar": "unrar x",
    "tar": "tar -xf",
}


def _unpacking(path: str, file_format: Format) -> str:
    """How a compressed file or an archive is unpacked; "" of other formats."""
    if file_format.word == "lfs":
        return FETCH
    command = _UNPACKED.get(file_format.word)
    return f"unpack it: {command} {shlex.quote(path)}" if command else ""


def some(paths: Sequence[str], most: int) -> Iterator[str]:
    """At most `most` of the paths, evenly spread, the first and the last among them."""
    count = min(len(paths), most)
    for number in range(count):
        yield paths[number * (len(paths) - 1) // max(1, count - 1)]
