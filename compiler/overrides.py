"""What the braces behind a `use` do: sections merged over those of the file that is used.

Non-goals: loading that file, and what the sections mean; an entry that makes no sense is found when they are read.
"""

from attrs import evolve

from .syntax import Entry, Rule, Section, Setting


def merge(base: Section, over: Section) -> Section:
    """`base` with the entries of `over` in the place of those of the same key, and the others of `over` behind.

    Sections in sections merge likewise, if they have the same name or `over` gives none.  Rules of `over` replace all
    rules of `base`, since their order is their priority.
    """
    rules = any(isinstance(entry, Rule) for entry in over.entries)
    entries = [entry for entry in base.entries if not (rules and isinstance(entry, Rule))]
    unmatched = list(range(len(entries)))  # each is replaced once, so that a key given twice in `over` stays visible
    for entry in over.entries:
        at = next((i for i in unmatched if _same(entries[i], entry)), None)
        if at is None:
            entries.append(entry)
        else:
            unmatched.remove(at)
            entries[at] = _merged(entries[at], entry)
    return evolve(base, entries=tuple(entries))


def _same(base: Entry, over: Entry) -> bool:
    match base, over:
        case Setting(), Setting():
            return base.key == over.key
        case Section(), Section():
            return base.kind == over.kind and over.name in (None, base.name)
        case _:
            return False


def _merged(base: Entry, over: Entry) -> Entry:
    return merge(base, over) if isinstance(base, Section) and isinstance(over, Section) else over
