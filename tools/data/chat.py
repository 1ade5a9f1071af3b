"""Conversations to text by a template, and the characters that the assistant wrote.

Templates are Jinja2 as Hugging Face's tokenizers have them, rendered in a sandbox: a template comes
with a model from somewhere.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import Enum, auto
from typing import Any, cast

from jinja2 import TemplateError as JinjaError
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_BEGIN, _END = "\ue0f0", "\ue0f1"
"""Private characters around what `{% generation %}` marks; no message may have them."""

Marked = tuple[str, list[tuple[int, int]]]
"""A text, and the characters of it that count."""


class TemplateError(Exception):
    """A template that is none, or that refuses messages."""


class Turns(Enum):
    """The turns of the assistant that count."""

    ALL = auto()
    LAST = auto()


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: what is between counts."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        """The block, its text between two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """A template with the special tokens that it may name, as `bos_token`."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
        )
        untyped = cast(Any, environment)
        untyped.filters["tojson"] = _to_json
        untyped.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(text)
        except JinjaError as error:
            raise TemplateError(f"it is no template: {error}") from None
        self._source, self._tokens = text, dict(tokens)
        self._marks = "endgeneration" in text

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process compiles it anew: what Jinja2 made of it cannot be sent."""
        return ChatTemplate, (self._source, self._tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], turns: Turns) -> Marked:
        """The conversation as text, and the characters of the turns that count.

        A template with `{% generation %}` says itself what counts.  With another, what a turn
        adds to the text before it counts, without white space at its end.

        TemplateError where earlier turns are rendered differently once later ones follow.
        """
        if self._marks:
            text, counted = self._render_marked(messages)
        else:
            text, counted = self._render_by_prefix(messages, turns)
        if turns is Turns.LAST:
            counted = counted[-1:]
        return text, counted

    def _render_marked(self, messages: Sequence[Mapping[str, Any]]) -> Marked:
        if _BEGIN in str(messages) or _END in str(messages):
            raise TemplateError("a message has a private character, U+E0F0 or U+E0F1")
        pieces = self._text(messages, prompt=False).split(_BEGIN)
        text, counted = pieces[0], list[tuple[int, int]]()
        for piece in pieces[1:]:
            inside, _, after = piece.partition(_END)
            counted.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, counted

    def _render_by_prefix(self, messages: Sequence[Mapping[str, Any]], turns: Turns) -> Marked:
        whole = self._text(messages, prompt=False)
        answers = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        if turns is Turns.LAST:
            answers = answers[-1:]
        counted = list[tuple[int, int]]()
        for number in answers:
            before = self._text(messages[:number], prompt=True)
            after = whole
            if number + 1 < len(messages):
                after = self._text(messages[: number + 1], prompt=False)
            if not after.startswith(before) or not whole.startswith(after):
                raise TemplateError(
                    "earlier turns are rendered differently once later ones follow;"
                    " --last-turn counts the last one alone, {% generation %} in the template"
                    " says what counts"
                )
            counted.append((len(before), len(after.rstrip())))
        return whole, counted

    def _text(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=prompt, **self._tokens
            )
        except (JinjaError, TypeError, ValueError) as error:
            raise TemplateError(str(error)) from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """Without HTML's escapes, which Jinja2's own filter writes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
