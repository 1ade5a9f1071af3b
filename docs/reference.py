"""Pages of the site that are generated from the compiler's own tables: commands, settings,
errors and warnings.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from textwrap import dedent

import attrs
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pygments.formatters import HtmlFormatter

from scalec.compiler.cli.commands import COMMANDS
from scalec.compiler.config.fields import Field, Part, Settings, fields_of, heading_of
from scalec.compiler.config.settings import Cluster, Flow, Pipelining, StateGroup, Train, Watch
from scalec.compiler.syntax.codes import get_codes

SECTIONS = {
    "train": Train,
    "state": Flow,
    "state group": StateGroup,
    "pipeline": Pipelining,
    "watch": Watch,
    "cluster": Cluster,
}
"""By the words that a plan has before the brackets."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    files.append(File.generated(config, "assets/code.css", content=_colours()))
    return files


def _colours() -> str:
    """The colours of code, on light and on dark pages."""
    light, dark = (HtmlFormatter(style=style) for style in ("default", "github-dark"))
    rules = (
        light.get_style_defs("[data-bs-theme=light] .codehilite"),
        dark.get_style_defs("[data-bs-theme=dark] .codehilite"),
    )
    return "\n".join(rules)


def pages() -> dict[str, str]:
    """The text of each generated page, by its name."""
    return {
        "commands": "\n".join(_commands()),
        "settings": "\n".join(_settings()),
        "codes": "\n".join(_codes()),
    }


def _commands() -> Iterator[str]:
    yield "# Commands\n\n`scalec --help` lists them, `scalec COMMAND --help` says what is below."
    for entry in COMMANDS:
        command = entry.load()
        parser = ArgumentParser(f"scalec {entry.name}", add_help=False)
        command.arguments(parser)
        yield f"\n## scalec {entry.name}\n\n{command.text}\n\n```\n{command.example}\n```\n"
        yield "| argument | |\n|---|---|"
        for action in parser._actions:
            options = ", ".join(f"`{option}`" for option in action.option_strings)
            value = f" `{action.metavar}`" if action.metavar else ""
            meaning = (action.help or "").replace("%(default)s", str(action.default))
            yield f"| {options}{value} | {_cell(meaning)} |"


def _settings() -> Iterator[str]:
    beside = "[`model`, `mesh` and `shard`](../language.md)"
    yield f"# Settings\n\nThe sections of a plan beside {beside}."
    for path, section in SECTIONS.items():
        yield from _section(section, path)


def _section(of: type[Settings], path: str) -> Iterator[str]:
    _, heading = heading_of(of)
    names = f"\n\nNames: {', '.join(f'`{name}`' for name in heading)}." if heading else ""
    yield f"\n## {path}\n\n{(of.__doc__ or '').strip()}{names}\n"
    yield "| setting | takes | default | meaning |\n|---|---|---|---|"
    fields = fields_of(of)
    yield from (_row(of, field) for field in fields)
    for field in fields:
        if isinstance(field.what, Part):
            yield from _section(field.what.section_class, f"{path} {field.key}")


def _row(of: type[Settings], field: Field) -> str:
    default = attrs.fields_dict(of)[field.name].default
    shown = (
        ""
        if field.required or default is None or isinstance(field.what, Part)
        else f"`{field.what.show(default)}`"
    )
    takes = "a section" if isinstance(field.what, Part) else field.what.takes
    only = ""
    if field.variants:
        only = f" ({' and '.join(f'`{name}`' for name in field.variants)} alone)"
    doc = "; ".join(filter(None, ("required" * field.required, field.doc + only)))
    return f"| `{field.key}` | {_cell(takes)} | {_cell(shown)} | {_cell(doc)} |"


def _codes() -> Iterator[str]:
    yield "# Errors and warnings\n\n`scalec explain CODE` prints these."
    for code, row in get_codes().items():
        yield f"\n## {code}\n\n**{row.title}.** {row.text}"
        for kind, words in (("Wrong", row.wrong), ("Right", row.right)):
            if words:
                yield f"\n{kind}:\n\n```\n{dedent(words).rstrip()}\n```"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
