"""Fields that are words: one of a few, a selection of names, strings, tokens."""

import re

from attrs import frozen

from ...syntax import tree
from ...syntax.diagnostics import did_you_mean, listing
from ...syntax.synonyms import value_meant
from .errors import unfit, wrong
from .field import WHAT, Metadata, Value
from .numbers import TOKEN, number_of, within


def choice(doc: str, *choices: str) -> Metadata:
    """One of a few words."""

    def read(setting: tree.Setting) -> str:
        match setting.value:
            case tree.Name(name=name) if name in choices:
                return name
            case tree.Name(name=name):
                help = did_you_mean(value_meant(name), choices) or f"it is one of {listing(choices)}"
                raise wrong("E0404", f"`{setting.key}` cannot be `{name}`", setting.value.span, help)
            case other:
                raise unfit(setting, other, f"one of {listing(choices)}")

    return {WHAT: Value(doc, read, str)}


@frozen
class Selection:
    """A word, and the number and the names that it was given as in a call."""

    word: str
    names: tuple[str, ...] = ()
    number: int = 0

    def __str__(self) -> str:
        given = [*([str(self.number)] if self.number else []), *self.names]
        return f"{self.word}({', '.join(given)})" if given else self.word


def selection(doc: str, *words: str, of: str, each: str) -> Metadata:
    """One of a few words, the word `of` with names, `selective(attention)`, or `each` with a number and a name."""
    listed = listing((*words, f"{of}(…)", f"{each}(2, …)"))

    def read(setting: tree.Setting) -> Selection:
        match setting.value:
            case tree.Name(name=name) if name in words:
                return Selection(name)
            case tree.Call(name=tree.Name(name=name), args=(_, *_) as args, kwargs=()) if name == of:
                return Selection(of, tuple(dict.fromkeys(_name(setting, expr) for expr in args)))
            case tree.Call(
                name=tree.Name(name=name),
                args=(tree.Number(value=int() as number, unit=""), tree.Name(name=dim)),
                kwargs=(),
            ) if name == each and number > 0:
                return Selection(each, (dim,), number)
            case tree.Name(name=name) | tree.Call(name=tree.Name(name=name)) as other if name == each:
                help = f"write `{each}(2, layers)`: every second iteration of the repeat over `layers`"
                raise wrong("E0404", f"`{each}` takes a number and the dim of a repeat", other.span, help)
            case tree.Name(name=name) | tree.Call(name=tree.Name(name=name)) as other if name == of:
                raise wrong("E0404", f"`{of}` names nothing", other.span, f"write `{of}(…)` with names in it")
            case tree.Name(name=name) as other:
                raise wrong("E0404", f"`{setting.key}` cannot be `{name}`", other.span, f"it is one of {listed}")
            case other:
                raise unfit(setting, other, f"one of {listed}")

    return {WHAT: Value(doc, read, str)}


def _name(setting: tree.Setting, expr: tree.Expr) -> str:
    if isinstance(expr, tree.Name):
        return expr.name
    raise unfit(setting, expr, "names")


def word(doc: str) -> Metadata:
    """A name, in quotes where it is not made of letters, digits and underscores."""

    def read(setting: tree.Setting) -> str:
        match setting.value:
            case tree.Name(name=text) | tree.String(value=text):
                return text
            case other:
                raise unfit(setting, other, "a name")

    def shown(text: str) -> str:
        return text if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", text) else _quoted(text)

    return {WHAT: Value(doc, read, shown)}


def text(doc: str) -> Metadata:
    """A string."""

    def read(setting: tree.Setting) -> str:
        match setting.value:
            case tree.String(value=""):
                raise wrong("E0405", f"`{setting.key}` is empty", setting.value.span)
            case tree.String(value=found):
                return found
            case other:
                raise unfit(setting, other, "a string")

    return {WHAT: Value(doc, read, _quoted)}


def texts(doc: str, named: tuple[str, ...] = ()) -> Metadata:
    """A list of strings, and of names that stand for something."""

    def item(setting: tree.Setting, expr: tree.Expr) -> str:
        match expr:
            case tree.Name(name=text) if text in named:
                return text
            case tree.String(value=text) if text in named:
                help = f'write `{text}`, or `"./{text}"` for a file of this name'
                raise wrong("E0404", f"write `{text}` without quotes", expr.span, help)
            case tree.String(value=text):
                return text
            case other:
                raise unfit(setting, other, "strings" + "".join(f" or `{name}`" for name in named))

    def read(setting: tree.Setting) -> tuple[str, ...]:
        match setting.value:
            case tree.List(items=(_, *_) as items):
                return tuple(item(setting, expr) for expr in items)
            case tree.List() as empty:
                raise wrong("E0405", f"`{setting.key}` is empty", empty.span)
            case other:
                raise unfit(setting, other, 'a list, as in `["corpus/*.txt"]`')

    def shown(items: tuple[str, ...]) -> str:
        return f"[{', '.join(text if text in named else _quoted(text) for text in items)}]"

    return {WHAT: Value(doc, read, shown)}


def token(doc: str) -> Metadata:
    """A token: its id, or, where tokens are bytes, the character of a byte."""

    def read(setting: tree.Setting) -> int | str:
        match setting.value:
            case tree.String(value=text) if len(text.encode()) == 1:
                return text
            case tree.String(value=text) as string:
                raise wrong("E0404", f"`{setting.key}` is one byte, not {len(text.encode())}", string.span)
            case other:
                number = number_of(setting, other, 'a token, as 103 or "\\n"')
                return int(within(TOKEN, number, setting, other))

    return {WHAT: Value(doc, read, lambda token: _quoted(token) if isinstance(token, str) else str(token))}


def _quoted(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return f'"{"".join(escapes.get(character, character) for character in text)}"'
