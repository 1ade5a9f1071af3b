"""Gathers a plan with all that it uses into one model and one section of each kind."""

from collections.abc import Iterable
from pathlib import Path

from attrs import evolve, frozen

from ..syntax import tree
from ..syntax.diagnostics import Diagnostics, Note, did_you_mean, listing, wrong
from ..syntax.limits import Reader, load
from ..syntax.package_data import SHIPPED, package_file, package_files
from ..syntax.parser import parse_with_mistakes
from ..syntax.source import Source

OF_MODEL = ("dims", "const")
"""The kinds of sections that belong to a model."""

DEEPEST = 8
"""How many files may use one another in a row."""

MESH = "mesh"
ONE_OF_A_KIND = ("data", "optimizer")
"""Sections that a plan has once: one of another name replaces the whole section."""

EITHER = {"files": "set", "set": "files"}
"""Entries that exclude each other in a section: one in the braces replaces all entries of the other
kind.
"""


@frozen
class Document:
    """The model, the merged sections by kind, and all declared ops."""

    source: Source
    model: tree.Model
    sections: dict[str, tree.Section]
    ops: tuple[tree.UserOp, ...]


def gather(
    source: Source, diagnostics: Diagnostics, over: Source | None = None, read: Reader = load
) -> Document:
    """The document of a plan and the files that it uses, with sections `over` its own.

    Raises PlanError where there is no model, or several; other mistakes are added to `diagnostics`.
    """
    models, sections, ops = _gather(source, (), diagnostics, read)
    if over:
        for section in _parse(over, diagnostics).sections():
            _add(section, sections, diagnostics)
    if len(models) == 1:
        return Document(source, models[0], sections, tuple(ops))
    if not models:
        diagnostics.check()
        model = "model NAME(tokens[batch, seq], labels[batch, seq]) { … }"
        help = f'write `{model}`, or `use "{SHIPPED}models/llama.scale"`'
        raise wrong("E0202", "this plan has no model", source.whole(), help=help)
    notes = (Note(models[0].name.span, "the first model"),)
    raise wrong("E0203", "a plan has one model", models[1].name.span, "a second one", notes=notes)


Gathered = tuple[list[tree.Model], dict[str, tree.Section], list[tree.UserOp]]


def _parse(source: Source, diagnostics: Diagnostics) -> tree.Plan:
    """The syntax tree of a text, as far as it can be read."""
    read = parse_with_mistakes(source)
    for mistake in read.mistakes:
        diagnostics.tell(mistake)
    diagnostics.doubtful |= read.doubtful
    diagnostics.used |= read.doubtful
    diagnostics.in_part |= read.in_part
    return read.plan


def _gather(
    source: Source, users: tuple[str, ...], diagnostics: Diagnostics, read: Reader
) -> Gathered:
    """The models, sections and ops of a file and of the files that it uses."""
    plan = _parse(source, diagnostics)
    models: list[tree.Model] = []
    ops = [item for item in plan.items if isinstance(item, tree.UserOp)]
    sections: dict[str, tree.Section] = {}
    for item in plan.items:
        if isinstance(item, tree.Use):
            used_models, used_sections, used_ops = _gather_used(
                item, source, (*users, source.path), diagnostics, read
            )
            ops += used_ops
            models += [_override(model, item.sections) for model in used_models]
            sections |= used_sections
            for section in item.sections:
                if section.kind.name not in OF_MODEL:
                    _add(section, sections, diagnostics)
    _add_own_sections(plan, sections, diagnostics)
    of_models: list[tree.Section] = []
    for model in models:
        of_models += [item for item in model.body if isinstance(item, tree.Section)]
    _check_forms([*sections.values(), *of_models], diagnostics)
    models += [item for item in plan.items if isinstance(item, tree.Model)]
    return models, sections, ops


def _add_own_sections(
    plan: tree.Plan, sections: dict[str, tree.Section], diagnostics: Diagnostics
) -> None:
    """Merges a file's own sections over the sections of the files that it uses."""
    own_sections: dict[str, tree.Section] = {}
    for section in plan.sections():
        if first := own_sections.get(section.kind.name):
            notes = [Note(first.head, "the first one")]
            message = f"section `{section.kind}` is given twice"
            diagnostics.error("E0204", message, section.head, "repeated", notes=notes)
        own_sections[section.kind.name] = section
        _add(section, sections, diagnostics)


def _gather_used(
    use: tree.Use, source: Source, users: tuple[str, ...], diagnostics: Diagnostics, read: Reader
) -> Gathered:
    with diagnostics.catch():
        return _gather(open_used_file(use, source, read, users), users, diagnostics, read)
    diagnostics.doubt(section="model")
    return [], {}, []


def _check_forms(sections: Iterable[tree.Section], diagnostics: Diagnostics) -> None:
    """Only dims have padding, and only `watch` has numbers of steps."""
    for section in sections:
        for entry in section.entries:
            if isinstance(entry, tree.Setting) and entry.pad and section.kind.name != "dims":
                diagnostics.error(
                    "E0406",
                    "only a dim is padded",
                    entry.pad.span,
                    f"not what `{section.kind}` sets",
                )
            if isinstance(entry, tree.Setting) and entry.every and section.kind.name != "watch":
                help = f"write `{entry.key} = {entry.value.span.words}`"
                diagnostics.error(
                    "E0406", "only `watch` has settings with `every`", entry.span, help=help
                )
        _check_forms(
            [entry for entry in section.entries if isinstance(entry, tree.Section)], diagnostics
        )


def _add(
    section: tree.Section, sections: dict[str, tree.Section], diagnostics: Diagnostics
) -> None:
    """Merges a section over the section of its kind, if there is one."""
    with diagnostics.catch():
        base = sections.get(section.kind.name)
        sections[section.kind.name] = merge(base, section) if base else section


def open_used_file(
    use: tree.Use, source: Source, read: Reader = load, users: tuple[str, ...] = ()
) -> Source:
    """The file that a plan uses, shown with its folder where a user has its name.

    Raises PlanError where it cannot be read, or is one of its `users`.
    """
    file_name, path = use.path.value, get_used_path(use, source)
    if len(users) > DEEPEST or str(path) in users:
        help = f"files cannot use one another in a cycle, nor be nested deeper than {DEEPEST}"
        raise wrong("E0205", f"cannot use `{file_name}`", use.path.span, "used here", help=help)
    file = read(path, use.path.span)
    names_of_users = {Path(user).name for user in (*users, source.path)}
    if path.name in names_of_users:
        return evolve(file, shown="/".join(path.parts[-2:]))
    return file


def get_used_path(use: tree.Use, source: Source) -> Path:
    """The path of a file that a plan uses.

    Raises PlanError where it is said to come with scalec, and does not.
    """
    file = use.path.value
    if not file.startswith(SHIPPED):
        return Path(source.path).parent / file
    path = package_file(file)
    if path is None:
        files = package_files()
        help = did_you_mean(file, files) or f"there are {listing(files)}"
        raise wrong(
            "E0205", f"`{file}` is not part of scalec", use.path.span, "not there", help=help
        )
    return path


def _override(model: tree.Model, overrides: tuple[tree.Section, ...]) -> tree.Model:
    """The model with `dims` and `const` of a `use` merged over its own."""
    body = [*model.body]
    for over in overrides:
        if over.kind.name not in OF_MODEL:
            continue
        for i, item in enumerate(body):
            if isinstance(item, tree.Section) and item.kind.name == over.kind.name:
                body[i] = merge(item, over)
                break
        else:  # the model has no such section
            body.insert(0, over)
    return evolve(model, body=tuple(body))


# ---- the sections in the braces after a `use`


def merge(base: tree.Section, over: tree.Section) -> tree.Section:
    """`base` with the entries of `over` in the place of entries of the same key, and the others of
    `over` after them.

    Sections in sections merge likewise, if they have the same name or `over` gives none.  A section
    of a kind that there is one of replaces a section of another name.  Rules of `over` replace all
    rules of `base`, since their order is their priority; sets of data replace its files.  Axes of a
    mesh are in an order too.  Raises PlanError where `over` leaves that open.
    """
    if base.kind.name == MESH and _gives_order(base, over):
        return evolve(base, entries=over.entries)
    entries = _entries_left(base, over)
    # each is replaced once, so that a key given twice in `over` stays visible
    unmatched = list(range(len(entries)))
    for entry in over.entries:
        index = next((i for i in unmatched if _same(entries[i], entry)), None)
        if index is None:
            entries.append(entry)
            continue
        unmatched.remove(index)
        entries[index] = _merge_entry(entries[index], entry)
    return evolve(base, entries=tuple(entries))


def _entries_left(base: tree.Section, over: tree.Section) -> list[tree.Entry]:
    """The entries of `base` that stay, or are merged with entries of the same key in `over`."""
    over_has_rules = any(isinstance(entry, tree.Rule) for entry in over.entries)
    excluded = {EITHER.get(_key(entry)) for entry in over.entries}
    entries: list[tree.Entry] = []
    for entry in base.entries:
        is_replaced_rule = over_has_rules and isinstance(entry, tree.Rule)
        if not is_replaced_rule and _key(entry) not in excluded:
            entries.append(entry)
    return entries


def _merge_entry(base: tree.Entry, over: tree.Entry) -> tree.Entry:
    """The entry `over`; two sections are merged, unless they have different names."""
    match base, over:
        case tree.Section(name=base_name), tree.Section(name=name) if name in (None, base_name):
            return merge(base, over)
        case _:
            return over


def _gives_order(base: tree.Section, over: tree.Section) -> bool:
    """Whether the axes go in the order of `over`, which then names all of them; else they go in
    the order of `base`, and `over` adds none.

    Raises PlanError where the order is open.
    """
    base_axes, over_axes = _keys(base), _keys(over)
    if set(base_axes) <= set(over_axes):
        return True
    if over_axes == [axis for axis in base_axes if axis in over_axes]:
        return False
    added = [axis for axis in over_axes if axis not in base_axes]
    unnamed = listing(axis for axis in base_axes if axis not in over_axes)
    if added:
        words = " or ".join(f"`{axis}`" for axis in added)
        message, label = f"the mesh does not say where {words} goes", "added"
    else:
        message, label = "the axes go in two orders", "not in this order"
    settings = (entry for entry in over.entries if isinstance(entry, tree.Setting))
    span = next(entry.span for entry in settings if entry.key.name in (added or over_axes))
    note = Note(base.head, f"has {listing(base_axes)}, outermost first")
    help = f"the order of axes matters: name {unnamed} here too, outermost first"
    raise wrong("E0519", message, span, label, help, notes=(note,))


def _keys(section: tree.Section) -> list[str]:
    """The keys of a section's settings, each once."""
    keys: dict[str, None] = {}
    for entry in section.entries:
        if isinstance(entry, tree.Setting):
            keys[entry.key.name] = None
    return list(keys)


def _key(entry: tree.Entry) -> str:
    """The key of a setting, the kind of a section; "" of others."""
    match entry:
        case tree.Setting(key=name) | tree.Section(kind=name):
            return name.name
        case _:
            return ""


def _same(base: tree.Entry, over: tree.Entry) -> bool:
    match base, over:
        case tree.Setting(), tree.Setting():
            return base.key == over.key
        case tree.Section(), tree.Section():
            return base.kind == over.kind and (
                over.kind.name in ONE_OF_A_KIND or over.name in (None, base.name)
            )
        case _:
            return False
