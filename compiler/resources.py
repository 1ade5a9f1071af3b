"""Where the package keeps what is not Python: grammars, templates, plans."""

from importlib import import_module
from pathlib import Path


def folder(package: str) -> Path:
    """The folder of a data package beside the compiler, for instance `grammar`."""
    return Path(import_module(f"scalec.{package}").__path__[0])
