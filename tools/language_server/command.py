"""The command `lsp`: a language server for plans, on standard input and output."""

from argparse import ArgumentParser, Namespace

from ...compiler.cli.command import Command
from ...compiler.cli.output import UsageError


def lsp(options: Namespace) -> None:
    """`scalec lsp`."""
    try:
        from .server import serve
    except ModuleNotFoundError as error:
        if error.name not in ("pygls", "lsprotocol"):
            raise
        raise UsageError("`scalec lsp` needs pygls: pip install 'scalec[lsp]'") from None
    serve()


def _arguments(parser: ArgumentParser) -> None:
    """There are none."""


COMMAND = Command(
    lsp,
    _arguments,
    "A language server for plans, which an editor starts, and to which it speaks on standard"
    " input and output.\n"
    "Needs pygls: pip install 'scalec[lsp]'.  docs/editors.md has what VS Code and Neovim need"
    " to start it.",
    "scalec lsp",
)
