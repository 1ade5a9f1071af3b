"""A configuration whose every field is accounted for.

Fields by name, each of the type that it has to be, with its place in the file; what no one took is an error.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from attrs import evolve, frozen

from ...syntax.diagnostics import Diagnostics, Note, PlanError, wrong
from ...syntax.limits import check
from ...syntax.source import Source, Span

ELSEWHERE = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _name_or_path attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward classifier_dropout decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label label2id length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_scores pad_token_id prefix problem_type qa_dropout remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id seq_classif_dropout summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
    temperature tie_last_hidden_states tokenizer_class top_k top_p torchscript transformers_version typical_p
    use_bfloat16 use_cache
    """.split()
)
"""Fields about tokens, files, generation and classification, which training of a language model does not ask for."""

SHOWN = 60
"""Characters of a value that a message shows."""

Places = Mapping[tuple[str, ...], Span]
"""Where each field is written, by the names of the tables around it and its own."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|[\[\]{}]')


@frozen
class Kind:
    """A type of a field."""

    text: str
    holds: Callable[[Any], bool]
    instead: Any
    """The value read in place of a mistake."""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


POSITIVE = Kind("a positive number", lambda value: _is_number(value) and 0 < value < 2**48, 1)
NOT_NEGATIVE = Kind("a number, at least 0", lambda value: _is_number(value) and 0 <= value < 2**48, 0)
SIZE = Kind("a whole number from 1 to 2^32", lambda value: type(value) is int and 0 < value <= 2**32, 1)
LAYERS = Kind("a whole number from 1 to 9999", lambda value: type(value) is int and 0 < value < 10_000, 1)
SHARE = Kind("a number, at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1, 0)
PART = Kind("a number, above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1, 1)
FLAG = Kind("`true` or `false`", lambda value: isinstance(value, bool), False)
TEXT = Kind("a string", lambda value: isinstance(value, str), "")
TABLE = Kind("a table of fields", lambda value: isinstance(value, dict), {})


class Fields:
    """The fields of a table in a configuration, and the mistakes that are found in them."""

    def __init__(self, fields: dict[str, Any], places: Places, path: tuple[str, ...], found: Diagnostics) -> None:
        self.found = found
        self._left, self._places, self._path = fields, places, path
        self._sound: dict[str, Any] = {}
        self._mistaken: set[str] = set()
        self._tables: list[Fields] = []

    def has(self, name: str) -> bool:
        """Whether the file has the field, not as null, and nobody took it."""
        return self._left.get(name) is not None

    def take(self, name: str) -> Any:
        """The field, whatever it is, which is then accounted for; None where the file leaves it out."""
        return self._left.pop(name, None)

    def drop(self) -> None:
        """Accounts for all that is left, where a mistake covers it."""
        self._left.clear()

    def read(self, name: str, kind: Kind, default: Any = None, null: Any = None) -> Any:
        """A field of a kind; `default` where the file leaves it out, `null` where it says so, else a mistake."""
        is_there, value = name in self._left, self.take(name)
        value = (null if value is None else value) if is_there else default
        if (is_there and not (value is null or kind.holds(value))) or value is None:
            message = f"is `{as_json(value)}`, not {kind.text}" if is_there else "is missing"
            self.wrong("E0803", f"`{name}` {message}", name)
            self._mistaken.add(name)
            return kind.instead
        self._sound[name] = value
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that is a positive number."""
        return self.read(name, POSITIVE, default)

    def size(self, name: str, default: int | None = None, null: int | None = None) -> int:
        """A field that is the size of a dim."""
        return self.read(name, SIZE, default, null)

    def layers(self, name: str, default: int | None = None) -> int:
        """A field that counts layers: their indices in the names of tensors have four digits."""
        return self.read(name, LAYERS, default)

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false."""
        return self.read(name, FLAG, default)

    def table(self, name: str) -> "Fields":
        """A field that holds fields, none if it is not there."""
        fields = dict(self.read(name, TABLE, {}, {}))
        self._tables.append(Fields(fields, self._places, (*self._path, name), self.found))
        return self._tables[-1]

    def must_be(self, name: str, *values: object) -> object:
        """A field that a plan expresses with these values alone; left out, it has the first."""
        value = self._left.pop(name, values[0])
        if as_json(value) not in map(as_json, values):  # in Python true is 1
            help = f"a plan is written for {' or '.join(f'`{as_json(each)}`' for each in values)}"
            self.wrong("E0801", f"`{name}` is `{as_json(value)}`, which this model does not have", name, help=help)
        return value

    def quotient(self, whole: str, part: str) -> int:
        """One field divided by another, which has to divide it; 0 after a mistake in either."""
        total, each = (self._sound.get(name, 0) for name in (whole, part))
        if each and total % each == 0:
            return total // each
        label = f"{total} / {each} = {total / each:g}" if each else ""
        self.misfit(f"`{part}` does not divide `{whole}`", part, whole, label=label)
        return 0

    def misfit(self, message: str, name: str, *others: str, label: str = "") -> None:
        """Adds a mistake of fields that do not fit together, unless one of them is a mistake by itself."""
        if not self._mistaken & {name, *others}:
            self.wrong("E0804", message, name, *others, label=label)

    def wrong(self, code: str, message: str, name: str, *others: str, label: str = "", help: str = "") -> None:
        """Adds a mistake at the first of these fields that the file has; the others have to do with it."""
        places = [place for each in (name, *others) if (place := self._places.get((*self._path, each)))]
        first, *more = places or [self.span(name)]
        self.found.error(code, message, first, label, notes=[Note(place, "see here") for place in more], help=help)

    def span(self, name: str) -> Span:
        """The field's place, or that of the table without it."""
        return self._places.get((*self._path, name)) or self._places.get(self._path, self._places[()])

    def check(self) -> None:
        """Adds a mistake for every field that nobody took."""
        for name in self._left:
            if self._path or name not in ELSEWHERE:
                help = "take it out if the model is the same without"
                self.wrong("E0801", f"no plan expresses `{name}`", name, help=help)
        for table in self._tables:
            table.check()


class Config(Fields):
    """The fields of a configuration.  Raises PlanError where the text is none."""

    def __init__(self, source: Source) -> None:
        super().__init__(_fields(source), _places(source), (), Diagnostics())
        self.left_out: dict[str, float] = {}

    def leave_out(self, name: str, default: float, kind: Kind = SHARE) -> None:
        """A number that is of training, not of the model; the plan says that it is left out, unless it is 0."""
        if value := self.read(name, kind, default, 0):
            self.left_out[name] = value


def as_json(value: object) -> str:
    """A value as JSON has it, or its beginning."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _fields(source: Source) -> dict[str, Any]:
    try:
        check(source)
        content: object = json.loads(source.text)
    except PlanError as error:
        raise PlanError([evolve(each, code="E0802") for each in error.diagnostics]) from None
    except json.JSONDecodeError as error:
        raise _unreadable(source.span(error.pos, error.pos + 1), error.msg) from None
    except ValueError as error:
        raise _unreadable(source.whole(), str(error)) from None
    if not isinstance(content, dict):
        raise _unreadable(source.whole(), "it holds no fields")
    return cast("dict[str, Any]", content)


def _unreadable(span: Span, why: str) -> PlanError:
    return wrong("E0802", f"this is not a configuration: {why.lower()}", span)


def _places(source: Source) -> Places:
    """The place of a name; of a name given twice the last one, whose value counts."""
    found: dict[tuple[str, ...], Span] = {(): source.whole()}
    path, name = list[str](), ""
    for token in _TOKEN.finditer(source.text):
        if token[0] in "[{":
            path.append(name)
        elif token[0] in "]}":
            path.pop()
        elif token[1]:
            name = json.loads(token[0].removesuffix(token[1]))
            found[*path[1:], name] = source.span(*token.span())
    return found
