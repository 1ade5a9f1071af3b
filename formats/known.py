"""Formats of files, known by their first bytes and a second look that confirms them.

Token ids may be any bytes, so that a short magic number alone decides nothing: a gzip file has to
inflate, a zip file to name its first member, a tar header to have its checksum.  Non-goals: the
format that a plan needs (`data`).
"""

import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FIRST, LAST = 1 << 16, 64
"""Bytes that are read of a file's beginning and of its end."""


@dataclass(frozen=True)
class Ends:
    """The beginning and the end of a file, and its size."""

    first: bytes
    last: bytes
    size: int

    @classmethod
    def from_path(cls, path: str | Path) -> "Ends":
        """OSError where the file cannot be read."""
        with open(path, "rb") as file:
            first = file.read(FIRST)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LAST))
            return cls(first, file.read(LAST), size)

    def number(self, start: int, count: int = 4) -> int:
        """`count` bytes of the beginning as a little-endian number."""
        return int.from_bytes(self.first[start : start + count], "little")

    @classmethod
    def from_content(cls, content: bytes) -> "Ends":
        """The ends of a file with this content."""
        return cls(content[:FIRST], content[-LAST:], len(content))

    @property
    def is_whole(self) -> bool:
        """Whether the beginning is the whole file."""
        return self.size <= len(self.first)


@dataclass(frozen=True)
class Format:
    """A format: a word for it, and how it is called in a sentence."""

    word: str
    name: str


def format_of(ends: Ends) -> Format | None:
    """The format of a file, if it is one that scalec knows."""
    return next((file_format for file_format, has_format in _KNOWN if has_format(ends)), None)


def get_format_words(path: str | Path) -> str:
    """The format of a file, as in `a web page (HTML)`; "" where it is not known, or the file
    cannot be read.
    """
    try:
        file_format = format_of(Ends.from_path(path))
    except OSError:
        return ""
    if file_format is None:
        return ""
    return f"{file_format.name}: {FETCH}" if file_format.word == "lfs" else file_format.name


FETCH = "fetch the file itself: git lfs pull"
"""The remedy for a pointer of Git LFS."""


# ---- magic numbers that are long enough

_MAGIC = {
    b"\x93NUMPY": Format("npy", "a NumPy array (.npy)"),
    b"\xfd7zXZ\0": Format("xz", "compressed by xz"),
    b"7z\xbc\xaf'\x1c": Format("7z", "a 7z archive"),
    b"Rar!\x1a\x07": Format("rar", "a RAR archive"),
    b"ARROW1\0\0": Format("arrow", "an Arrow file"),
    b"\x89HDF\r\n\x1a\n": Format("hdf5", "an HDF5 file"),
    b"SQLite format 3\0": Format("sqlite", "an SQLite database"),
    b"MMIDIDX\0\0": Format("megatron", "the index of a Megatron dataset"),
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": Format("torch", "a file of torch.save"),
    b"\x89PNG\r\n\x1a\n": Format("png", "a PNG picture"),
    b"version https://git-lfs.github.com/spec/": Format(
        "lfs", "a pointer of Git LFS in place of the file itself"
    ),
}


def _starts_with(magic: bytes) -> Callable[[Ends], bool]:
    return lambda ends: ends.first.startswith(magic)


# ---- shorter ones, each with a second look


def _is_gzip(ends: Ends) -> bool:
    """The only compression method, no reserved flags, and data that inflates."""
    if ends.first[:3] != b"\x1f\x8b\x08" or ends.first[3] & 0xE0:
        return False
    try:
        zlib.decompressobj(31).decompress(ends.first, 1 << 12)
    except zlib.error:
        return False
    return True


def _is_bzip2(ends: Ends) -> bool:
    return bool(re.match(rb"BZh[1-9]1AY&SY", ends.first))


def _is_zstandard(ends: Ends) -> bool:
    """A frame header without reserved bits, and blocks of known kinds that end with the file
    (RFC 8878).
    """
    if ends.first[:4] != b"\x28\xb5\x2f\xfd" or ends.number(4, 1) & 0x08:
        return False
    flags = ends.number(4, 1)
    is_single = flags >> 5 & 1
    dictionary = (0, 1, 2, 4)[flags & 3]
    content = (is_single, 2, 4, 8)[flags >> 6]
    checksum = 4 * (flags >> 2 & 1)
    place, is_last = 5 + (1 - is_single) + dictionary + content, False
    while not is_last and place < len(ends.first):
        block = ends.number(place, 3)
        is_last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
        if kind == 3 or size > 1 << 17:
            return False
        place += 3 + (1 if kind == 1 else size)  # kind 1 is one byte, repeated `size` times
    if not is_last:  # the beginning that was read ends within the frame
        return place <= ends.size
    end = place + checksum
    return end == ends.size or (end < ends.size and ends.number(end) in _FRAMES)


_FRAMES = {0xFD2FB528, *range(0x184D2A50, 0x184D2A60)}
"""The numbers with which another frame of zstd may begin."""


def _is_lz4(ends: Ends) -> bool:
    """Version 1 of a frame, without reserved bits, and the checksum of its descriptor."""
    flags, sizes = ends.number(4, 1), ends.number(5, 1)
    if ends.first[:4] != b"\x04\x22\x4d\x18" or flags >> 6 != 1 or flags & 2 or sizes & 0x8F:
        return False
    length = 2 + 8 * (flags >> 3 & 1) + 4 * (flags & 1)
    return ends.number(4 + length, 1) == _xxh32(ends.first[4 : 4 + length]) >> 8 & 0xFF


def _xxh32(data: bytes) -> int:
    """The hash xxHash of less than 16 bytes."""
    result = 374761393 + len(data)
    whole = len(data) // 4 * 4
    for start in range(0, whole, 4):
        result += int.from_bytes(data[start : start + 4], "little") * 3266489917
        result = _rotate_left(result, 17) * 668265263
    for byte in data[whole:]:
        result = _rotate_left(result + byte * 374761393, 11) * 2654435761
    result &= 0xFFFFFFFF
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        result = (result ^ result >> shift) * factor & 0xFFFFFFFF
    return result ^ result >> 16


def _rotate_left(number: int, by: int) -> int:
    number &= 0xFFFFFFFF
    return (number << by | number >> 32 - by) & 0xFFFFFFFF


def _member(ends: Ends) -> str:
    """The name of the first member of a zip file; "" where there is none."""
    if ends.first[:4] != b"PK\x03\x04" or len(ends.first) < 31:
        return ""
    version, _, method = struct.unpack_from("<HHH", ends.first, 4)
    length = ends.number(26, 2)
    name = ends.first[30 : 30 + length].decode("utf-8", "replace")
    is_plausible = version & 0xFF <= 63 and method <= 99 and 0 < length <= 1024
    return name if is_plausible and name.isprintable() else ""


def _is_numpy_zip(ends: Ends) -> bool:
    return _member(ends).endswith(".npy")


def _is_torch_zip(ends: Ends) -> bool:
    return _member(ends).endswith(("data.pkl", "/byteorder", "/version", ".format_version"))


def _is_zip(ends: Ends) -> bool:
    return bool(_member(ends)) or (ends.first[:4] == b"PK\x05\x06" and ends.size == 22)


def _is_tar(ends: Ends) -> bool:
    """`ustar` at its place, and the checksum of the header."""
    header = ends.first[:512]
    if len(header) < 512 or header[257:262] != b"ustar":
        return False
    checksum = header[148:156].strip(b"\0 ")
    # the checksum counts its own eight bytes as spaces
    counted = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    return checksum.isdigit() and int(checksum, 8) == counted


def _is_parquet(ends: Ends) -> bool:
    return ends.first[:4] in (b"PAR1", b"PARE") and ends.last[-4:] == ends.first[:4]


def _is_feather(ends: Ends) -> bool:
    return ends.first[:4] == b"FEA1" and ends.last[-4:] == b"FEA1"


def _is_arrow_stream(ends: Ends) -> bool:
    """A message of metadata: a flatbuffer with a root table, and its vtable inside."""
    length, root = ends.number(4), ends.number(8)
    most = min(ends.size, len(ends.first)) - 8
    if ends.first[:4] != b"\xff\xff\xff\xff" or not 16 <= length <= most:
        return False
    if length % 8 or not 4 <= root <= length - 4:
        return False
    table = 8 + root
    vtable = table - ends.number(table)
    if not 8 <= vtable < table:
        return False
    size = ends.number(vtable, 2)
    return 4 <= size <= 64 and size % 2 == 0


def _is_orc(ends: Ends) -> bool:
    return ends.first[:3] == b"ORC" and b"ORC" in ends.last[-16:]


def _is_avro(ends: Ends) -> bool:
    return ends.first[:4] == b"Obj\x01" and b"avro.schema" in ends.first[:4096]


def _is_tfrecord(ends: Ends) -> bool:
    """A length with its checksum."""
    if ends.size < 16 or ends.number(0, 8) + 16 > ends.size:
        return False
    crc = _crc32c(ends.first[:8])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return ends.number(8) == masked


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _is_pickle(ends: Ends) -> bool:
    """A protocol from 2 to 5, its end, and some operations in between that can be read."""
    if ends.first[:1] != b"\x80" or not 2 <= ends.number(1, 1) <= 5 or ends.last[-1:] != b".":
        return False
    import pickletools  # hardly any file gets here

    count = 0
    try:
        for _ in pickletools.genops(ends.first):
            count += 1
    except (ValueError, IndexError):
        return count >= 4 and not ends.is_whole
    return True


def _is_safetensors(ends: Ends) -> bool:
    """The length of a header, which begins as JSON does."""
    length = ends.number(0, 8)
    return 2 <= length <= ends.size - 8 and bool(re.match(rb'\{\s*("|\}\s*$)', ends.first[8:]))


def _is_gguf(ends: Ends) -> bool:
    return ends.first[:4] == b"GGUF" and 1 <= ends.number(4) <= 9


def _is_llm_c(ends: Ends) -> bool:
    """The header of 256 numbers of llm.c, with as many tokens as follow it."""
    width = {20240520: 2, 20240801: 4}.get(ends.number(0))
    return width is not None and ends.size == 1024 + width * ends.number(8)


def _is_jpeg(ends: Ends) -> bool:
    return ends.first[:3] == b"\xff\xd8\xff" and ends.first[6:10] in (b"JFIF", b"Exif")


def _is_wave(ends: Ends) -> bool:
    return ends.first[:4] == b"RIFF" and ends.first[8:12] == b"WAVE"


def _is_pdf(ends: Ends) -> bool:
    return bool(re.match(rb"%PDF-\d\.\d", ends.first))


def _is_elf(ends: Ends) -> bool:
    kind = ends.first[4:7]
    return (
        ends.first[:4] == b"\x7fELF"
        and kind[:1] in (b"\1", b"\2")
        and kind[1:] in (b"\1\1", b"\2\1")
    )


# ---- formats of text


def text_of(ends: Ends) -> str:
    """The beginning of a file as UTF-8; "" where it is not UTF-8, or has control characters that
    text does not have.
    """
    try:
        text = ends.first.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_cut = not ends.is_whole and len(ends.first) - error.start < 4
        if not is_cut:
            return ""
        text = ends.first[: error.start].decode("utf-8-sig")
    return "" if re.search(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]", text) else text


def _is_wide_text(ends: Ends) -> bool:
    """UTF-16 with its mark; nearly all characters are letters or signs."""
    if ends.first[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return False
    text = ends.first[: len(ends.first) // 2 * 2].decode("utf-16", "replace")
    usual = sum(character.isprintable() or character.isspace() for character in text)
    return "\N{REPLACEMENT CHARACTER}" not in text[:-1] and usual > 0.99 * len(text)


def _is_web_page(ends: Ends) -> bool:
    return bool(
        re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", ends.first[:1024], re.IGNORECASE)
    )


def _json_values(ends: Ends) -> Iterator[object]:
    """The objects that JSON begins with: the first two of lines, the first of a list; one that
    is cut off is empty.
    """
    text = text_of(ends).lstrip()
    if text.startswith("["):
        text = text[1:].lstrip()
    while text.startswith("{"):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            if not ends.is_whole and re.match(r'\{\s*"[^"\n]*"\s*:', text):
                yield {}
            return
        if value:
            yield value
        text = text[end:].lstrip(" \t\r")
        if text and text[0] not in "\n,]":
            return
        text = text.lstrip(" \t\r\n,")


def _is_json_lines(ends: Ends) -> bool:
    """Two objects on lines of their own."""
    if not ends.first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return False
    values = _json_values(ends)
    return next(values, None) is not None and next(values, None) is not None


def _is_json(ends: Ends) -> bool:
    """One object, which is all of the file, or a list of objects."""
    if not re.match(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{", ends.first):
        return False
    first = next(_json_values(ends), None)
    if first is None:
        return False
    text = text_of(ends).strip()
    return text.startswith("[") or not ends.is_whole or _is_all(text)


def _is_all(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


_KNOWN: tuple[tuple[Format, Callable[[Ends], bool]], ...] = (
    *((known, _starts_with(magic)) for magic, known in _MAGIC.items()),
    (Format("gzip", "compressed by gzip"), _is_gzip),
    (Format("bzip2", "compressed by bzip2"), _is_bzip2),
    (Format("zstd", "compressed by zstd"), _is_zstandard),
    (Format("lz4", "compressed by lz4"), _is_lz4),
    (Format("npz", "an archive of NumPy arrays (.npz)"), _is_numpy_zip),
    (Format("torch", "a file of torch.save"), _is_torch_zip),
    (Format("zip", "a zip archive"), _is_zip),
    (Format("tar", "a tar archive"), _is_tar),
    (Format("parquet", "a Parquet file"), _is_parquet),
    (Format("feather", "a Feather file"), _is_feather),
    (Format("arrow", "a stream of Arrow, as Hugging Face's datasets write them"), _is_arrow_stream),
    (Format("orc", "an ORC file"), _is_orc),
    (Format("avro", "an Avro file"), _is_avro),
    (Format("tfrecord", "a TFRecord file"), _is_tfrecord),
    (Format("safetensors", "a file of weights (safetensors)"), _is_safetensors),
    (Format("gguf", "a file of weights (GGUF)"), _is_gguf),
    (Format("pickle", "a pickle of Python"), _is_pickle),
    (Format("llm.c", "a file of token ids with the header of llm.c"), _is_llm_c),
    (Format("jpeg", "a JPEG picture"), _is_jpeg),
    (Format("wave", "a recording (WAVE)"), _is_wave),
    (Format("pdf", "a PDF document"), _is_pdf),
    (Format("elf", "a program"), _is_elf),
    (Format("html", "a web page (HTML)"), _is_web_page),
    (Format("utf-16", "text in UTF-16"), _is_wide_text),
    (Format("jsonl", "JSON lines"), _is_json_lines),
    (Format("json", "a JSON document"), _is_json),
)
