"""Where the package keeps what is not Python: grammars, templates, plans."""

from importlib import import_module
from pathlib import Path
from typing import Any


def folder(package: str) -> Path:
    """The folder of a data package beside the compiler, for instance `grammar`."""
    return Path(import_module(f"scalec.{package}").__path__[0])


def filled(template: str, *, escaped: bool = False, **values: Any) -> str:
    """A template of `codegen_templates` with these values, `escaped` where it is HTML."""
    import jinja2  # loads slowly, and most commands fill none

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder("codegen_templates")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=escaped,
    )
    return environment.get_template(template).render(**values)
