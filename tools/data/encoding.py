"""Text to token ids with a `tokenizer.json`, and which of them count."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from .documents import Document, Span
from .sources import BadRecord, SourceError

Array = np.ndarray[Any, Any]

CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
"""Files that lie beside a tokenizer.json."""


class TokenizerFiles(NamedTuple):
    """A tokenizer.json, and what its neighbours say of it.

    special   special tokens by their names, as bos_token
    template  the template of conversations, "" if there is none
    """

    path: str
    special: dict[str, str]
    template: str


def read_tokenizer(name: str) -> TokenizerFiles:
    """The tokenizer of a file or of a model's folder.  SourceError."""
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        raise SourceError(f"there is no `{path}`; a model's folder on the hub has one")
    config = _config(path.with_name(CONFIG))
    special = dict(_special_tokens(config))
    return TokenizerFiles(str(path), special, _template(path, config))


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {path}: {error}") from None
    return cast(dict[str, Any], config) if isinstance(config, dict) else {}


def _special_tokens(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names that end in `_token` with their texts, which may be objects of their own."""
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        if isinstance(value, dict):
            value = cast(dict[str, Any], value).get("content")
        if isinstance(value, str):
            yield name, value


def _template(path: Path, config: dict[str, Any]) -> str:
    beside = path.with_name(TEMPLATE)
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        for entry in cast(list[Any], template):
            if entry.get("name") == "default":
                return str(entry["template"])
    return template if isinstance(template, str) else ""


class Encoded(NamedTuple):
    """A document's ids, and for each whether it counts (all of them where None)."""

    ids: Array
    counted: Array | None


class Encoder:
    """A tokenizer with the ids that it puts around each document.

    SourceError where the file is no tokenizer, or a token is not in its vocabulary.
    """

    def __init__(self, path: str, bos: str = "", eos: str = "") -> None:
        # processes share the work, not the threads of one
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise SourceError(
                "`scalec data` needs the package tokenizers: pip install 'scalec[data]'"
            ) from None
        try:
            content = Path(path).read_text(encoding="utf-8")
            self._tokenizer = Tokenizer.from_str(content)
        except Exception as error:  # the package raises bare exceptions
            raise SourceError(f"{path} is no tokenizer.json: {error}") from None
        # what a model was trained with, cut or filled up, is no part of a document
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()
        self.vocab = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos, self.eos = self._id(bos), self._id(eos)

    def _id(self, token: str) -> int | None:
        if not token:
            return None
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise SourceError(f"`{token}` is no token of the tokenizer")
        return int(number)

    def encode(self, documents: Sequence[Document]) -> list[Encoded | BadRecord]:
        """The ids of documents; an id beyond the vocabulary, or a text of no token, is bad."""
        texts = [document.text for document in documents if document.ids is None]
        # places of characters, which the fast way leaves out, are needed where some do not count
        is_masked = any(document.counted is not None for document in documents)
        encode = self._tokenizer.encode_batch if is_masked else self._tokenizer.encode_batch_fast
        encodings = iter(encode(texts, add_special_tokens=False))
        results = list[Encoded | BadRecord]()
        for document in documents:
            if document.ids is not None:
                results.append(self._check(document))
            else:
                results.append(self._finish(document, next(encodings)))
        return results

    def decode(self, ids: Array) -> str:
        """The text of ids, special tokens too."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _check(self, document: Document) -> Encoded | BadRecord:
        assert document.ids is not None, "encoding: a document of text"
        wrong = [number for number in document.ids if not 0 <= number <= self.largest]
        if wrong:
            return BadRecord(
                document.place,
                "an id beyond the vocabulary",
                f"{wrong[0]}, and the tokenizer's largest is {self.largest:,}",
            )
        return Encoded(np.array(document.ids, dtype=np.uint32), None)

    def _finish(self, document: Document, encoding: Any) -> Encoded | BadRecord:
        ids = np.array(encoding.ids, dtype=np.uint32)
        if not len(ids):
            return BadRecord(document.place, "a text of no token")
        counted = None
        if document.counted is not None:
            counted = _find_counted(document.counted, encoding)
            if not counted.any():
                return BadRecord(document.place, "no token counts")
        return self._surround(Encoded(ids, counted))

    def _surround(self, encoded: Encoded) -> Encoded:
        """With the tokens at a document's beginning and end; the end is predicted where its
        answer is.
        """
        ids, counted = encoded
        if self.bos is not None:
            ids = np.concatenate([[np.uint32(self.bos)], ids])
            counted = None if counted is None else np.concatenate([[False], counted])
        if self.eos is not None:
            ids = np.concatenate([ids, [np.uint32(self.eos)]])
            counted = None if counted is None else np.concatenate([counted, [counted[-1]]])
        return Encoded(ids, counted)


def _find_counted(spans: Sequence[Span], encoding: Any) -> Array:
    """The tokens that share a character with a span, as transformers finds them."""
    counted = np.zeros(len(encoding.ids), dtype=bool)
    for span in spans:
        first = _token_at(range(span.start, span.stop), encoding)
        last = _token_at(range(span.stop - 1, span.start - 1, -1), encoding)
        if first is not None and last is not None:
            counted[first : last + 1] = True
    return counted


def _token_at(characters: range, encoding: Any) -> int | None:
    """The token of the first of these characters that has one: a tokenizer may drop white space."""
    for character in characters:
        token: int | None = encoding.char_to_token(character)
        if token is not None:
            return token
    return None
