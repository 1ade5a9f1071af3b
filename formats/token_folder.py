"""A folder of tokens as `scalec data` writes it: token ids, which of them count as labels, where
documents begin, and an index with hashes.

Each shard has up to three files of raw little-endian numbers:

    tokens-00000.bin      ids, uint16, or uint32 from 65,536 entries of the vocabulary on
    counts-00000.bin      a bit a token, the lowest first: whether the loss counts its prediction;
                          only in folders where some tokens do not count
    documents-00000.bin   uint64, the number of the first token of each document of the shard

`index.json` is written last: a folder without it is not whole.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

INDEX = "index.json"
FORMAT = 1

TOKENS, COUNTS, DOCUMENTS = "tokens", "counts", "documents"
"""The kinds of a shard's files."""

_PIECE = 1 << 20


class TokenFolderError(Exception):
    """A folder that holds no tokens, or no longer the tokens of its index."""


@dataclass(frozen=True)
class Shard:
    """One shard: its tokens, its documents, the tokens that count, and a hash of each of its
    files by kind.
    """

    tokens: int
    documents: int
    counted: int
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class TokenSource:
    """A file that the tokens were made from."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Recipe:
    """All that decides the bytes of a folder, beside the content of its sources.

    tokenizer, template  sha256 of their text; template is "" without conversations
    records              how a record becomes documents, in words of the command line
    bos, eos             ids around each document; None for none
    masked               whether some tokens do not count
    pair                 whether documents come by twos: the chosen one, then the rejected one
    """

    tokenizer: str
    template: str
    records: str
    vocab: int
    bos: int | None
    eos: int | None
    masked: bool
    pair: bool
    skip_bad: bool

    @property
    def dtype(self) -> str:
        """The type of a token."""
        if self.vocab < 1 << 16:
            return "uint16"
        return "uint32"


@dataclass(frozen=True)
class TokenFolder:
    """The index of a folder."""

    recipe: Recipe
    sources: tuple[TokenSource, ...]
    shards: tuple[Shard, ...]
    skipped: Mapping[str, int]
    """Records that were left out, by the reason."""

    @property
    def tokens(self) -> int:
        """The tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """The documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def counted(self) -> int:
        """The tokens whose predictions count."""
        return sum(shard.counted for shard in self.shards)

    def require_samples(self, folder: str | Path) -> None:
        """TokenFolderError where documents are no samples by themselves."""
        if self.recipe.pair:
            raise TokenFolderError(
                f"{folder} has pairs of chosen and rejected answers, and no loss takes pairs yet:"
                " the rejected ones would be learnt too"
            )

    def to_json(self) -> str:
        """The text of `index.json`."""
        content = {
            "format": FORMAT,
            "recipe": asdict(self.recipe),
            "sources": [asdict(source) for source in self.sources],
            "shards": [shard_to_json(shard) for shard in self.shards],
            "skipped": dict(self.skipped),
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: str | Path) -> "TokenFolder":
        """The index of a folder.  TokenFolderError where there is none, or none of this format."""
        path = Path(folder) / INDEX
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TokenFolderError(
                f"{folder} has no {INDEX}: `scalec data` writes it when all tokens are there"
            ) from None
        except OSError as error:
            raise TokenFolderError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise TokenFolderError(f"{path} is no JSON") from None
        if not isinstance(content, dict) or "format" not in content or "shards" not in content:
            raise TokenFolderError(f"{path} is not the index of a folder of `scalec data`")
        index = cast(dict[str, Any], content)
        if index["format"] != FORMAT:
            raise TokenFolderError(
                f"{path} has format {index['format']}, and this scalec reads {FORMAT}"
            )
        try:
            return cls(
                Recipe(**index["recipe"]),
                tuple(TokenSource(**source) for source in index["sources"]),
                tuple(Shard(**shard) for shard in index["shards"]),
                index["skipped"],
            )
        except (TypeError, KeyError, AttributeError):
            raise TokenFolderError(f"{path} lacks entries of an index") from None


def shard_to_json(shard: Shard) -> dict[str, Any]:
    """A shard as an object of JSON."""
    return {**asdict(shard), "hashes": dict(shard.hashes)}


def sibling(tokens: str, kind: str) -> str:
    """The path of the file of another kind that lies beside a shard's tokens."""
    folder, name = os.path.split(tokens)
    return os.path.join(folder, name.replace(TOKENS, kind, 1))


def shard_file(kind: str, number: int) -> str:
    """The name of a shard's file of a kind."""
    return f"{kind}-{number:05}.bin"


def file_hash(path: str | Path) -> str:
    """The hash of a file as shards have it: BLAKE2b of 16 bytes.  OSError."""
    return _digest(path, hashlib.blake2b(digest_size=16))


def source_hash(path: str | Path) -> str:
    """The sha256 of a file.  OSError."""
    return _digest(path, hashlib.sha256())


def _digest(path: str | Path, digest: Any) -> str:
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
