"""The sections in the braces after a `use`, merged over those of the file that is used."""

from attrs import evolve

from .diagnostics import Note, listing, wrong
from .tree import Entry, Rule, Section, Setting

MESH = "mesh"
ONE_OF_A_KIND = ("data", "optimizer")
"""Sections that a plan has once: one of another name replaces the whole section."""

EITHER = {"files": "set", "set": "files"}
"""Entries of which a section has one kind or the other: one in the braces replaces those of the other kind."""


def merge(base: Section, over: Section) -> Section:
    """`base` with the entries of `over` in the place of those of the same key, and the others of `over` after them.

    Sections in sections merge likewise, if they have the same name or `over` gives none.  A section of a kind that
    there is one of replaces that of another name.  Rules of `over` replace all rules of `base`, since their order is
    their priority; sets of data replace its files.  Axes of a mesh are in an order too.  Raises PlanError where `over`
    leaves that open.
    """
    if base.kind.name == MESH and _gives_order(base, over):
        return evolve(base, entries=over.entries)
    rules = any(isinstance(entry, Rule) for entry in over.entries)
    replaced = {EITHER.get(_key(entry)) for entry in over.entries}
    entries = [
        entry for entry in base.entries if not (rules and isinstance(entry, Rule)) and _key(entry) not in replaced
    ]
    unmatched = list(range(len(entries)))  # each is replaced once, so that a key given twice in `over` stays visible
    for entry in over.entries:
        at = next((i for i in unmatched if _same(entries[i], entry)), None)
        if at is None:
            entries.append(entry)
        else:
            unmatched.remove(at)
            entries[at] = _merged(entries[at], entry)
    return evolve(base, entries=tuple(entries))


def _gives_order(base: Section, over: Section) -> bool:
    """Whether the order of axes is that of `over`, which names all; else it is that of `base`, with no axis more."""
    known, given = _keys(base), _keys(over)
    if set(known) <= set(given):
        return True
    if given == [axis for axis in known if axis in given]:
        return False
    added = [axis for axis in given if axis not in known]
    unnamed = listing(axis for axis in known if axis not in given)
    message = (
        f"the mesh does not say where {' or '.join(f'`{word}`' for word in added)} goes"
        if added
        else "the axes go in two orders"
    )
    entries = (entry for entry in over.entries if isinstance(entry, Setting))
    span = next(entry.span for entry in entries if entry.key.name in (added or given))
    note = Note(base.head, f"has {listing(known)}, outermost first")
    help = f"the order of axes matters: name {unnamed} here too, outermost first"
    raise wrong("E0519", message, span, "added" if added else "not in this order", help, notes=(note,))


def _keys(section: Section) -> list[str]:
    """Each key once."""
    return list(dict.fromkeys(entry.key.name for entry in section.entries if isinstance(entry, Setting)))


def _key(entry: Entry) -> str:
    """The key of a setting, the kind of a section; "" of others."""
    match entry:
        case Setting(key=name) | Section(kind=name):
            return name.name
        case _:
            return ""


def _same(base: Entry, over: Entry) -> bool:
    match base, over:
        case Setting(), Setting():
            return base.key == over.key
        case Section(), Section():
            return base.kind == over.kind and (over.kind.name in ONE_OF_A_KIND or over.name in (None, base.name))
        case _:
            return False


def _merged(base: Entry, over: Entry) -> Entry:
    match base, over:
        case Section(name=known), Section(name=name) if name in (None, known):
            return merge(base, over)
        case _:
            return over
