"""From a name to its definition, to all its mentions, to another name; from a line to those of
`train.py`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from os.path import realpath

from ...frontend.load_plan import used_path
from ...syntax import tree
from ...syntax.diagnostics import PlanError, wrong
from ...syntax.package_data import SHIPPED
from ...syntax.source import Span
from .document import Document, Facts, source_of
from .mentions import RENAMED, Kind, Mention

FROM_SETTINGS = {"seq": "seq", "batch": "microbatch", "microbatches": "global_batch"}
"""The settings that give the dims of the data their sizes."""


def definition(document: Document, line: int, column: int) -> Span | None:
    """Where the name at a place gets its meaning; of a file that is used, its beginning."""
    if not (document.syntax and (mention := document.mention(line, column))):
        return None
    if mention.kind is Kind.FILE:
        paths = [path for path, use in _used(document) if use.path.span == mention.span]
        return Span(paths[0], 1, 1, 1, 1) if paths else None
    bound = [it for it in document.syntax.mentions if it.binds and _same(it, mention)]
    if mention.kind is Kind.VALUE:
        before = [
            it
            for it in bound
            if it.span.path == mention.span.path and it.span.start <= mention.span.start
        ]
        bound = before[-1:] or bound
    if not bound and mention.kind is Kind.DIM:
        key = FROM_SETTINGS.get(mention.name)
        bound = [it for it in document.syntax.mentions if (it.kind, it.name) == (Kind.SETTING, key)]
    return document.here(bound[0].span) if bound else None


def _used(document: Document) -> Iterator[tuple[str, tree.Use]]:
    """The path of each file that a document uses, also by way of another."""
    for plan in document.syntax.plans if document.syntax else ():
        for use in plan.items:
            if isinstance(use, tree.Use):
                with suppress(PlanError):
                    yield str(used_path(use, source_of(plan))), use


def _same(one: Mention, other: Mention) -> bool:
    return (one.kind, one.name) == (other.kind, other.name)


def references(
    documents: Iterable[Document], mention: Mention, *, binding: bool = True
) -> list[Span]:
    """All mentions of a name in documents that share the file that it is bound in, each once."""
    found: dict[tuple[str, int, int], Span] = {}
    for document in documents:
        for it in document.syntax.mentions if document.syntax else ():
            if (
                _same(it, mention)
                and (binding or not it.binds)
                and (span := document.here(it.span))
            ):
                found.setdefault((realpath(span.path), *span.start), span)
    return [*found.values()]


def users(document: Document, mention: Mention, others: Iterable[Document]) -> list[Document]:
    """The documents for which a name means the same: those that use the file that binds it."""
    assert document.syntax, "lsp: a mention without syntax"
    bound = {it.span.path for it in document.syntax.mentions if it.binds and _same(it, mention)}
    paths = set(map(realpath, bound or {document.source.path}))
    sharing = (
        it
        for it in others
        if it.syntax and paths & {realpath(plan.span.path) for plan in it.syntax.plans}
    )
    return [document, *(other for other in sharing if other.source.path != document.source.path)]


def renamable(documents: Sequence[Document], mention: Mention) -> list[Span]:
    """The places of a name that its author may replace.

    Raises PlanError where it cannot be replaced.
    """
    at = mention.span
    if mention.kind not in RENAMED or mention.name in (
        *FROM_SETTINGS,
        "tokens",
        "labels",
        "documents",
        "loss",
    ):
        raise wrong(
            "E0215", f"`{mention.name}` is a word of the language", at, "not a name of this plan"
        )
    if not all(document.is_current for document in documents):
        raise wrong("E0104", "a plan with a syntax error, in which no name can be replaced", at)
    found = references(documents, mention)
    shipped = {
        realpath(path)
        for it in documents
        for path, use in _used(it)
        if use.path.value.startswith(SHIPPED)
    }
    if not shipped.isdisjoint(realpath(span.path) for span in found):
        raise wrong("E0215", f"`{mention.name}` is a name of a file that comes with scalec", at)
    return found


def renamed(documents: Sequence[Document], mention: Mention, name: str) -> list[Span]:
    """The places where a name is to be replaced.

    Raises PlanError where it cannot be, or the other name is taken.
    """
    found = renamable(documents, mention)
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,63}", name):
        raise wrong("E0215", f"`{name}` cannot be a name", mention.span)
    taken = {
        it.name: it.kind
        for document in documents
        if document.syntax
        for it in document.syntax.mentions
    }
    if (kind := taken.get(name)) in RENAMED:
        raise wrong("E0207", f"`{name}` is the name of another {kind.said}", mention.span)
    return found


# ---- the program


def emitted(facts: Facts, span: Span) -> tuple[str, list[int]]:
    """The text of `train.py`, and the lines of it, counted from 1, that come from a line of the
    plan.
    """
    from ...emit.train_py import train_py

    text = train_py(facts.program, facts.source)
    mark = re.compile(rf"(?<![\w./-]){re.escape(str(span))}(?!\d)")
    return text, [number for number, line in enumerate(text.split("\n"), 1) if mark.search(line)]
