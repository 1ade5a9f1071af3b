"""The files of the package that are not Python: grammars, templates, plans."""

from importlib import import_module
from pathlib import Path
from typing import Any


def folder(package: str) -> Path:
    """The folder of a data package beside the compiler, for instance `grammar`."""
    return Path(import_module(f"scalec.{package}").__path__[0])


SHIPPED = "scalec:"
"""Begins the names of plans and models that come with scalec: `scalec:llama3_8b`,
`scalec:models/llama.scale`.
"""


def package_files() -> dict[str, Path]:
    """The plans and models that come with scalec, by their names."""
    plans = folder("plans")
    files: dict[str, Path] = {}
    for path in sorted(plans.rglob("*.scale")):
        files[f"{SHIPPED}{path.relative_to(plans).as_posix()}"] = path
    return files


def package_file(name: str) -> Path | None:
    """The file of a name, which may leave out `.scale`; None if nothing of that name comes with
    scalec.
    """
    files = package_files()
    return files.get(name) or files.get(f"{name}.scale")


def fill_template(template: str, *, escaped: bool = False, **values: Any) -> str:
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
