"""A configuration whose every field is accounted for.

Fields by name, each of the type that it has to be, with its place in the file.  A field that
nothing reads is noted in the plan, unless transformers may read it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from attrs import evolve, frozen

from ...compiler.syntax.diagnostics import Diagnostics, Note, PlanError, wrong
from ...compiler.syntax.limits import check
from ...compiler.syntax.source import Source, Span

ELSEWHERE = frozenset(
    """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
        _flash_attn_2_enabled _name_or_path attn_implementation auto_map bad_words_ids
        begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
        classifier_dropout decoder_start_token_id diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
        forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label label2id
        length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups
        num_beams num_labels num_return_sequences output_attentions output_hidden_states output_past
        output_scores pad_token_id prefix problem_type qa_dropout remove_invalid_values
        repetition_penalty return_dict return_dict_in_generate sep_token_id seq_classif_dropout
        summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj suppress_tokens task_specific_params temperature tie_last_hidden_states
        tokenizer_class top_k top_p torchscript transformers_version typical_p use_bfloat16
        use_cache
    """.split()
)
"""Fields about tokens, files, generation and classification, which training of a language model
does not ask for.
"""

EFFECTS = {
    "add_cross_attention": "lets layers attend to an encoder",
    "attention_bias": "gives the products of attention a bias",
    "attention_chunk_size": "cuts the sequence into chunks that attend to themselves alone",
    "attn_logit_softcapping": "bounds the scores of attention",
    "clip_qkv": "bounds queries, keys and values",
    "cross_attention_hidden_size": "is the width of an encoder",
    "decoder_sparse_step": "says which layers have experts",
    "default_theta": "is the base of rotary positions where no other field says it",
    "final_logit_softcapping": "bounds the logits",
    "fusion_config": "replaces modules when weights are loaded",
    "head_dim": "is the size of a head",
    "hidden_act": "is the function between the products of an MLP",
    "hidden_activation": "is the function between the products of an MLP",
    "is_causal": "says whether a token sees only the tokens before it",
    "is_encoder_decoder": "says that there is an encoder too",
    "mlp_bias": "gives the products of the MLP a bias",
    "mlp_only_layers": "says which layers have no experts",
    "moe_layer_freq": "says which layers have experts",
    "num_key_value_heads": "is the number of heads that keys and values have",
    "partial_rotary_factor": "is the part of each head that is rotated",
    "per_layer_config": "gives layers other sizes than the rest",
    "pretraining_tp": "computes products in as many parts, as one run of pretraining did",
    "pruned_heads": "removes heads of attention",
    "quantization_config": "says that weights are stored in fewer bits than they are trained in",
    "reorder_and_upcast_attn": "computes the scores of attention in float32",
    "router_jitter_noise": "multiplies the input of routers by random numbers",
    "scale_attn_by_inverse_layer_idx": "divides the scores of a layer by its number",
    "scoring_func": "makes scores of the logits of a router",
    "sinusoidal_pos_embds": "makes positions of sines, which are not trained",
    "sliding_window": "limits how many tokens a query sees",
    "tie_encoder_decoder": "shares weights between an encoder and a decoder",
    "tie_word_embeddings": "shares the weights of the embedding with the head",
    "topk_method": "says how a token's experts are chosen",
    "truncate": "rounds the range of pairs that yarn scales in part",
    "use_bidirectional_attention": "lets a token see the tokens after it",
    "use_mrope": "rotates by positions in time, height and width",
    "use_sliding_window": "limits how many tokens the queries of some layers see",
}
"""Each field's effect, in the words that follow the name of the field in a message."""

READ_BY_LIBRARY: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_chunk_size": (None,),
    "cross_attention_hidden_size": (None,),
    "default_theta": (None,),
    "fusion_config": (None, {}),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "per_layer_config": (None, {}),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "tie_encoder_decoder": (False, None),
    "use_bidirectional_attention": (False, None),
}
"""Fields that code of all models in transformers reads, and the values that change nothing."""

NEWEST = (5, 23)
"""The version of transformers whose classes the importer knows: fields of later ones may be
read.
"""

SHOWN = 60
"""Characters of a value that a message shows."""

Path = tuple[str, ...]
"""The names of the tables around a field, and its own."""

_VERSION = re.compile(r"(\d+)\.(\d+)")

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
NOT_NEGATIVE = Kind(
    "a number, at least 0", lambda value: _is_number(value) and 0 <= value < 2**48, 0
)
SIZE = Kind(
    "a whole number from 1 to 2^32", lambda value: type(value) is int and 0 < value <= 2**32, 1
)
LAYERS = Kind(
    "a whole number from 1 to 9999", lambda value: type(value) is int and 0 < value < 10_000, 1
)
SHARE = Kind(
    "a number, at least 0 and below 1", lambda value: _is_number(value) and 0 <= value < 1, 0
)
PART = Kind(
    "a number, above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1, 1
)
FLAG = Kind("`true` or `false`", lambda value: isinstance(value, bool), False)
TEXT = Kind("a string", lambda value: isinstance(value, str), "")
TABLE = Kind("a table of fields", lambda value: isinstance(value, dict), {})


class Fields:
    """The fields of a table in a configuration, and the mistakes that are found in them."""

    def __init__(
        self,
        fields: dict[str, Any],
        places: dict[Path, Span],
        path: Path,
        diagnostics: Diagnostics,
        unread: dict[str, object],
    ) -> None:
        """`unread` collects the fields that change nothing, with their values."""
        self.diagnostics, self.unread = diagnostics, unread
        self._remaining, self._places, self._path = fields, places, path
        self._sound: dict[str, Any] = {}
        self._mistaken: set[str] = set()
        self._tables: list[Fields] = []

    def has(self, name: str) -> bool:
        """Whether the file has the field, not as null, and nobody took it."""
        return self._remaining.get(name) is not None

    def take(self, name: str) -> Any:
        """The field, whatever it is, which is then accounted for; None where the file leaves it
        out.
        """
        return self._remaining.pop(name, None)

    def refuse_rest(self, help: str) -> None:
        """Adds a mistake for each field that is left, which stands in the wrong table."""
        for name in self._remaining:
            self.wrong("E0801", f"no plan expresses `{name}` here", name, help=help)
        self.drop()

    def drop(self) -> None:
        """Accounts for all that is left, where a mistake covers it."""
        self._remaining.clear()

    def get_field(self, name: str, kind: Kind, default: Any = None, null: Any = None) -> Any:
        """A field of a kind; `default` where the file leaves it out, `null` where it says so,
        else a mistake.
        """
        mistake = ""
        if name not in self._remaining:
            value = default
            if value is None:
                mistake = "is missing"
        else:
            value = self.take(name)
            if value is None:
                value = null
            if value is None or not (value is null or kind.holds(value)):
                mistake = f"is `{as_json(value)}`, not {kind.text}"
        if mistake:
            self.wrong("E0803", f"`{name}` {mistake}", name)
            self._mistaken.add(name)
            return kind.instead
        self._sound[name] = value
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A field that is a positive number."""
        return self.get_field(name, POSITIVE, default)

    def size(self, name: str, default: int | None = None, null: int | None = None) -> int:
        """A field that is the size of a dim."""
        return self.get_field(name, SIZE, default, null)

    def layers(self, name: str, default: int | None = None) -> int:
        """A field that counts layers: their indices in the names of tensors have four digits."""
        return self.get_field(name, LAYERS, default)

    def flag(self, name: str, default: bool) -> bool:
        """A field that is true or false."""
        return self.get_field(name, FLAG, default)

    def table(self, name: str) -> "Fields":
        """A field that holds fields, none if it is not there."""
        fields = dict(self.get_field(name, TABLE, {}, {}))
        self._tables.append(
            Fields(fields, self._places, (*self._path, name), self.diagnostics, self.unread)
        )
        return self._tables[-1]

    def must_be(self, name: str, *values: object) -> object:
        """A field that a plan expresses with these values alone; left out, it has the first."""
        value = self._remaining.pop(name, values[0])
        if not is_one_of(value, values):
            self.refuse(name, value, values)
        return value

    def refuse(self, name: str, value: object, values: Sequence[object]) -> None:
        """Adds a mistake for a field that has none of the values that a plan expresses."""
        expressed = " or ".join(f"`{as_json(choice)}`" for choice in values)
        effect = f"`{name}` {EFFECTS[name]}; " if name in EFFECTS else ""
        help = f"{effect}a plan is written for {expressed}"
        self.wrong(
            "E0801",
            f"`{name}` is `{as_json(value)}`, which this model does not have",
            name,
            help=help,
        )

    def check_repeats(self, name: str, other: str, value: object) -> None:
        """A field that no class reads and that says the same as `other`, whose value this is;
        noted, or a mistake.
        """
        if not self.has(name):
            return
        repeated = self.take(name)
        if as_json(repeated) == as_json(value):
            self.note(name, repeated)
            return
        message = f"`{name}` is `{as_json(repeated)}`, and `{other}` is `{as_json(value)}`"
        help = f"transformers reads `{other}` alone; give both the same value, or delete `{name}`"
        self.wrong("E0804", message, name, other, help=help)

    def hand_down(self, name: str, table: "Fields", called: str) -> None:
        """Moves a field into the table that later files have it in, by the name `called`; where the
        table has it too, both have to be equal.
        """
        if not self.has(name):
            self.take(name)
            return
        path = (*table._path, called)
        if table.has(called):
            self.check_repeats(name, ".".join(path), table._remaining[called])
            return
        table._remaining[called] = self.take(name)
        self._places[path] = self.span(name)

    def note(self, name: str, value: object) -> None:
        """Notes a field that changes nothing."""
        self.unread[".".join((*self._path, name))] = value

    def quotient(self, whole: str, part: str) -> int:
        """One field divided by another, which has to divide it; 0 after a mistake in either."""
        total, divisor = self._sound.get(whole, 0), self._sound.get(part, 0)
        label = ""
        if divisor:
            if total % divisor == 0:
                return total // divisor
            label = f"{total} / {divisor} = {total / divisor:g}"
        self.misfit(f"`{part}` does not divide `{whole}`", part, whole, label=label)
        return 0

    def misfit(self, message: str, name: str, *others: str, label: str = "") -> None:
        """Adds a mistake of fields that do not fit together, unless one of them is a mistake by
        itself.
        """
        if not self._mistaken & {name, *others}:
            self.wrong("E0804", message, name, *others, label=label)

    def wrong(
        self, code: str, message: str, name: str, *others: str, label: str = "", help: str = ""
    ) -> None:
        """Adds a mistake at the first of these fields that the file has; the others are shown
        beside it.
        """
        places: list[Span] = []
        for field in (name, *others):
            if place := self._places.get((*self._path, field)):
                places.append(place)
        first, *further = places or [self.span(name)]
        notes = [Note(place, "see here") for place in further]
        self.diagnostics.error(code, message, first, label, notes=notes, help=help)

    def span(self, name: str) -> Span:
        """The field's place, or the place of the table if the file lacks the field."""
        return self._places.get((*self._path, name)) or self._places.get(
            self._path, self._places[()]
        )

    def check(self, readers: str = "") -> None:
        """Notes every field that nobody took; a mistake where it may be read by `readers`."""
        for name, value in self._remaining.items():
            if self._path or name not in ELSEWHERE:
                self._check_left(name, value, readers)
        for table in self._tables:
            table.check(readers)

    def _check_left(self, name: str, value: object, readers: str) -> None:
        neutral = () if self._path else READ_BY_LIBRARY.get(name, ())
        if neutral and not is_one_of(value, neutral):
            self.refuse(name, value, neutral)
        elif readers and not neutral:
            help = f"{readers} may read it; transformers {_version(NEWEST)} does not"
            self.wrong("E0801", f"what `{name}` does is not known", name, help=help)
        else:
            self.note(name, value)


class Config(Fields):
    """The fields of a configuration.  Raises PlanError where the text is none."""

    def __init__(self, source: Source) -> None:
        repeated = list[tuple[str, object, object]]()
        fields, places = _fields(source, repeated), _places(source)
        last_places = {path: spans[-1] for path, spans in places.items()}
        super().__init__(fields, last_places, (), Diagnostics(), {})
        self.left_out: dict[str, float] = {}
        self._has_own_code = bool(fields.get("auto_map"))
        self._written_by = str(fields.get("transformers_version"))
        for name, first, last in repeated:
            self._check_repeated(name, first, last, places)

    def _check_repeated(
        self, name: str, first: object, last: object, places: Mapping[Path, list[Span]]
    ) -> None:
        """A field that the text gives twice: the last one counts, so that both have to be the
        same.
        """
        if as_json(first) == as_json(last):
            self.note(f"{name}, once more", last)
            return
        spans = next(spans for path, spans in places.items() if path[-1:] == (name,) and spans[1:])
        message = f"`{name}` is given twice, as `{as_json(first)}` and as `{as_json(last)}`"
        notes = (Note(spans[-2], "given before here"),)
        help = "transformers reads the last one; delete the one that is wrong"
        self.diagnostics.error("E0804", message, spans[-1], notes=notes, help=help)

    def check(self, readers: str = "") -> None:
        """Checks the fields as any table does; other code may read fields that the classes of
        transformers do not have.
        """
        super().check(readers or self._other_readers())

    def _other_readers(self) -> str:
        """Code that may read fields which the classes that the importer knows do not read; ""
        if there is none.
        """
        if self._has_own_code:
            return "the code that `auto_map` names"
        version = _VERSION.match(self._written_by)
        if version and tuple(map(int, version.groups())) > NEWEST:
            return f"transformers {version[0]}, which wrote this file,"
        return ""

    def merge(self, alias: str, name: str) -> None:
        """Makes `alias`, another name of transformers for the field `name`, that field."""
        if alias not in self._remaining:
            return
        if name in self._remaining:
            self.check_repeats(alias, name, self._remaining[name])
            return
        self._remaining[name] = self._remaining.pop(alias)
        self._places[name,] = self._places[alias,]

    def leave_out(self, name: str, default: float, kind: Kind = SHARE) -> None:
        """A number that is of training, not of the model; the plan says that it is left out,
        unless it is 0.
        """
        if value := self.get_field(name, kind, default, 0):
            self.left_out[name] = value


def is_one_of(value: object, values: Sequence[object]) -> bool:
    """Whether a value is one of these, as JSON has them: in Python true is 1."""
    return as_json(value) in map(as_json, values)


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def as_json(value: object) -> str:
    """A value as JSON has it, or its beginning."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _fields(source: Source, repeated: list[tuple[str, object, object]]) -> dict[str, Any]:
    """The fields of the text; `repeated` gets each name that a table has twice, with its first
    and its last value.
    """

    def make_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict[str, Any]()
        for name, value in pairs:
            if name in table:
                repeated.append((name, table[name], value))
            table[name] = value
        return table

    try:
        check(source)
        content: object = json.loads(source.text, object_pairs_hook=make_table)
    except PlanError as error:
        raise PlanError(
            [evolve(diagnostic, code="E0802") for diagnostic in error.diagnostics]
        ) from None
    except json.JSONDecodeError as error:
        raise _unreadable(source.span(error.pos, error.pos + 1), error.msg) from None
    except ValueError as error:
        raise _unreadable(source.whole(), str(error)) from None
    if not isinstance(content, dict):
        raise _unreadable(source.whole(), "it holds no fields")
    return cast("dict[str, Any]", content)


def _unreadable(span: Span, why: str) -> PlanError:
    return wrong("E0802", f"this is not a configuration: {why.lower()}", span)


def _places(source: Source) -> dict[Path, list[Span]]:
    """The places of each name in order; of a name given twice the last value counts."""
    spans_by_path: dict[Path, list[Span]] = {(): [source.whole()]}
    path, name = list[str](), ""
    for token in _TOKEN.finditer(source.text):
        if token[0] in "[{":
            path.append(name)
        elif token[0] in "]}":
            path.pop()
        elif token[1]:
            name = json.loads(token[0].removesuffix(token[1]))
            spans_by_path.setdefault((*path[1:], name), []).append(source.span(*token.span()))
    return spans_by_path
