"""From a name to its definition, to all its mentions, to another name; from a line of the plan to
lines of `train.py`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from os.path import realpath

from ...compiler.frontend.load_plan import get_used_path
from ...compiler.syntax import tree
from ...compiler.syntax.diagnostics import PlanError, wrong
from ...compiler.syntax.package_data import SHIPPED
from ...compiler.syntax.source import Span
from .document import Document, Facts, source_of
from .mentions import RENAMABLE, Kind, Mention

FROM_SETTINGS = {"seq": "seq", "batch": "microbatch", "microbatches": "global_batch"}
"""The settings that give the dims of the data their sizes."""

RESERVED = (*FROM_SETTINGS, "tokens", "labels", "documents", "loss")
"""Names that have a meaning in all plans."""


def definition(document: Document, line: int, column: int) -> Span | None:
    """Where the name at a place gets its meaning; for the name of a used file, its beginning."""
    if not document.syntax:
        return None
    mention = document.mention(line, column)
    if not mention:
        return None
    if mention.kind is Kind.FILE:
        for path, use in _used_files(document):
            if use.path.span == mention.span:
                return Span(path, 1, 1, 1, 1)
        return None
    binding = _binding(document.syntax.mentions, mention)
    return document.to_current_span(binding.span) if binding else None


def _binding(mentions: Sequence[Mention], mention: Mention) -> Mention | None:
    """The mention that gives a name its meaning: for a value, the last one before its use."""
    bindings = [other for other in mentions if other.binds and _is_same_name(other, mention)]
    if mention.kind is Kind.VALUE:
        for binding in reversed(bindings):
            span = binding.span
            if span.path == mention.span.path and span.start <= mention.span.start:
                return binding
    if bindings:
        return bindings[0]
    if mention.kind is Kind.DIM:
        key = FROM_SETTINGS.get(mention.name)
        for setting in mentions:
            if (setting.kind, setting.name) == (Kind.SETTING, key):
                return setting
    return None


def _used_files(document: Document) -> Iterator[tuple[str, tree.Use]]:
    """The path of each file that a document uses, also by way of another."""
    for plan in document.plans:
        for use in plan.items:
            if isinstance(use, tree.Use):
                with suppress(PlanError):
                    yield str(get_used_path(use, source_of(plan))), use


def _is_same_name(one: Mention, other: Mention) -> bool:
    return (one.kind, one.name) == (other.kind, other.name)


def references(
    documents: Iterable[Document], mention: Mention, *, binding: bool = True
) -> list[Span]:
    """All mentions of a name, each once, in documents that share the file that binds it."""
    spans: dict[tuple[str, int, int], Span] = {}
    for document in documents:
        for other in document.mentions:
            if not _is_same_name(other, mention) or (other.binds and not binding):
                continue
            span = document.to_current_span(other.span)
            if span:
                spans.setdefault((realpath(span.path), *span.start), span)
    return [*spans.values()]


def users(document: Document, mention: Mention, others: Iterable[Document]) -> list[Document]:
    """The documents for which a name means the same: they use the file that binds it."""
    assert document.syntax, "lsp: a mention without syntax"
    binding_paths = {
        other.span.path
        for other in document.syntax.mentions
        if other.binds and _is_same_name(other, mention)
    }
    paths = set(map(realpath, binding_paths or {document.source.path}))
    documents = [document]
    for other in others:
        if not other.syntax or other.source.path == document.source.path:
            continue
        if not paths.isdisjoint(realpath(plan.span.path) for plan in other.syntax.plans):
            documents.append(other)
    return documents


def find_renamable_spans(documents: Sequence[Document], mention: Mention) -> list[Span]:
    """The places of a name that its author may replace.

    Raises PlanError where it cannot be replaced.
    """
    span = mention.span
    if mention.kind not in RENAMABLE or mention.name in RESERVED:
        raise wrong(
            "E0215", f"`{mention.name}` is a word of the language", span, "not a name of this plan"
        )
    if not all(document.is_current for document in documents):
        raise wrong("E0104", "a plan with a syntax error, in which no name can be replaced", span)
    spans = references(documents, mention)
    shipped = set[str]()
    for document in documents:
        for path, use in _used_files(document):
            if use.path.value.startswith(SHIPPED):
                shipped.add(realpath(path))
    if not shipped.isdisjoint(realpath(span.path) for span in spans):
        raise wrong("E0215", f"`{mention.name}` is a name of a file that comes with scalec", span)
    return spans


def find_rename_spans(documents: Sequence[Document], mention: Mention, name: str) -> list[Span]:
    """The places where a name is to be replaced.

    Raises PlanError where it cannot be, or the other name is taken.
    """
    spans = find_renamable_spans(documents, mention)
    if not re.fullmatch("[A-Za-z][A-Za-z0-9_]{0,63}", name):
        raise wrong("E0215", f"`{name}` cannot be a name", mention.span)
    kinds_by_name = dict[str, Kind]()
    for document in documents:
        for other in document.mentions:
            kinds_by_name[other.name] = other.kind
    kind = kinds_by_name.get(name)
    if kind in RENAMABLE:
        raise wrong("E0207", f"`{name}` is the name of another {kind.words}", mention.span)
    return spans


# ---- the program


def find_emitted_lines(facts: Facts, span: Span) -> tuple[str, list[int]]:
    """The text of `train.py`, and the numbers, from 1, of its lines that come from a line of the
    plan.
    """
    from ...compiler.emit.train_py import train_py

    text = train_py(facts.program, facts.source)
    mark = re.compile(rf"(?<![\w./-]){re.escape(str(span))}(?!\d)")
    return text, [number for number, line in enumerate(text.split("\n"), 1) if mark.search(line)]
