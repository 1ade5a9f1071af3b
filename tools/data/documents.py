"""A record to documents: their text, and which of it the loss counts."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

from .chat import ChatTemplate, TemplateError, Turns
from .sources import BadRecord, Place, Record


class Span(NamedTuple):
    """Characters of a text, the last not included."""

    start: int
    stop: int


class Document(NamedTuple):
    """A text with its place; the characters whose tokens count, or None where all do.

    `ids` are there in place of the text where the record has token ids already.
    """

    place: Place
    text: str
    counted: tuple[Span, ...] | None = None
    ids: tuple[int, ...] | None = None


class Reader(Protocol):
    """How records become documents."""

    words: str
    """The words of the command line, for the index."""
    fields: tuple[str, ...]
    masked: bool
    pair: bool

    def documents(self, record: Record) -> Iterator[Document]:
        """The documents of a record.  BadRecord."""
        ...


class TextReader:
    """A field of each record, or the whole of a text file."""

    masked = pair = False

    def __init__(self, field: str) -> None:
        self.fields = (field,)
        self.words = f"--field {field}"

    def documents(self, record: Record) -> Iterator[Document]:
        """One document."""
        if isinstance(record.value, str):
            yield _document(record.place, record.value)
        else:
            yield _document(record.place, _text(record, self.fields[0]))


class AnswerReader:
    """A prompt, which does not count, and an answer."""

    masked, pair = True, False

    def __init__(self, prompt: str, answer: str) -> None:
        self.fields = (prompt, answer)
        self.words = f"--prompt {prompt} --answer {answer}"

    def documents(self, record: Record) -> Iterator[Document]:
        """One document."""
        prompt, answer = (_text(record, field) for field in self.fields)
        text = prompt + answer
        if not answer:
            raise BadRecord(record.place, "empty answer")
        yield Document(record.place, text, (Span(len(prompt), len(text)),))


class ChatReader:
    """A list of messages, of which the assistant's turns count."""

    masked, pair = True, False

    def __init__(self, field: str, template: ChatTemplate, turns: Turns) -> None:
        self.fields = (field,)
        self.words = f"--chat {field}"
        if turns is Turns.LAST:
            self.words += " --last-turn"
        self._template, self._turns = template, turns

    def documents(self, record: Record) -> Iterator[Document]:
        """One document."""
        yield self.document(record, _messages(record, self.fields[0]))

    def document(self, record: Record, messages: list[dict[str, Any]]) -> Document:
        """The document of messages."""
        if not any(message.get("role") == "assistant" for message in messages):
            raise BadRecord(record.place, "no turn of the assistant")
        try:
            text, counted = self._template.render(messages, self._turns)
        except TemplateError as error:
            raise BadRecord(record.place, "the template refuses it", str(error)) from None
        return Document(record.place, text, tuple(Span(*span) for span in counted))


class PairReader:
    """A chosen and a rejected answer, each text or messages, after a prompt if there is one."""

    masked = pair = True
    PROMPT = "prompt"

    def __init__(self, chosen: str, rejected: str, chat: ChatReader | None) -> None:
        self._answers, self._chat = (chosen, rejected), chat
        self.fields = (chosen, rejected, self.PROMPT)
        self.words = f"--pair {chosen} {rejected}"

    def documents(self, record: Record) -> Iterator[Document]:
        """Two documents: the chosen one, then the rejected one."""
        for field in self._answers:
            value = _value(record, field)
            if isinstance(value, str):
                yield self._plain(record, value)
            elif self._chat is None:
                raise BadRecord(record.place, f"`{field}` is no text", "messages need a template")
            else:
                messages = [*self._prompt_messages(record), *_messages(record, field)]
                yield self._chat.document(record, messages)

    def _plain(self, record: Record, answer: str) -> Document:
        prompt = ""
        if isinstance(record.value, dict) and self.PROMPT in record.value:
            prompt = _text(record, self.PROMPT)
        if not answer:
            raise BadRecord(record.place, "empty answer")
        text = prompt + answer
        return Document(record.place, text, (Span(len(prompt), len(text)),))

    def _prompt_messages(self, record: Record) -> list[dict[str, Any]]:
        assert isinstance(record.value, dict), "documents: a text file has no fields"
        prompt = record.value.get(self.PROMPT)
        if prompt is None:
            return []
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        return _messages(record, self.PROMPT)


class IdReader:
    """A field of token ids, made elsewhere with the same tokenizer."""

    masked = pair = False

    def __init__(self, field: str) -> None:
        self.fields = (field,)
        self.words = f"--ids {field}"

    def documents(self, record: Record) -> Iterator[Document]:
        """One document."""
        field = self.fields[0]
        value = _value(record, field)
        if not isinstance(value, list):
            raise BadRecord(record.place, f"`{field}` is no list of token ids")
        ids = cast(list[Any], value)
        if not all(type(number) is int for number in ids):
            raise BadRecord(record.place, f"`{field}` is no list of token ids")
        if not ids:
            raise BadRecord(record.place, "empty document")
        yield Document(record.place, "", ids=tuple(ids))


def _document(place: Place, text: str) -> Document:
    if not text.strip():
        raise BadRecord(place, "empty document")
    return Document(place, text)


def _value(record: Record, field: str) -> Any:
    """The field of a record."""
    if isinstance(record.value, str):
        raise BadRecord(record.place, "a file of text", f"records with `{field}` are in `.jsonl`")
    if field not in record.value:
        raise BadRecord(record.place, f"no field `{field}`", _fields_there(record.value))
    return record.value[field]


def _text(record: Record, field: str) -> str:
    value = _value(record, field)
    if not isinstance(value, str):
        raise BadRecord(record.place, f"`{field}` is no text", f"it is {_kind(value)}")
    return value


def _messages(record: Record, field: str) -> list[dict[str, Any]]:
    value = _value(record, field)
    if not isinstance(value, list) or not value:
        raise BadRecord(record.place, f"`{field}` is no list of messages", f"it is {_kind(value)}")
    messages = cast(list[Any], value)
    for message in messages:
        if not isinstance(message, dict) or not isinstance(cast(Any, message).get("role"), str):
            raise BadRecord(
                record.place, f"`{field}` has a message without a role", "each is {role, content}"
            )
    return cast(list[dict[str, Any]], messages)


def _fields_there(value: dict[str, Any]) -> str:
    names = [f"`{name}`" for name in value][:8]
    if not names:
        return "it has none"
    return f"it has {', '.join(names)}"


def _kind(value: Any) -> str:
    """The JSON word for a value."""
    for kind, word in _WORDS:
        if isinstance(value, kind):
            return word
    return "null"


_WORDS: Sequence[tuple[type | tuple[type, ...], str]] = (
    (bool, "true or false"),
    ((int, float), "a number"),
    (str, "text"),
    (list, "a list"),
    (dict, "an object"),
)
