"""The command `completion`: the script with which a shell completes commands, options, plans and
`scalec:NAME`.

The shell then starts `scalec` with the words so far in its environment, and argcomplete answers
from the parser.  Non-goals: completion in editors (`lsp`).
"""

from argparse import Action, ArgumentParser, Namespace
from typing import Any

from .command import Command, plan_path
from .explain import TOPIC, TOPICS
from .output import UsageError

SHELLS = ("bash", "zsh", "fish")
PLAN_SUFFIXES = ("scale", "ir")


def completion(options: Namespace) -> None:
    """`scalec completion SHELL`."""
    print(_get_argcomplete().shellcode(["scalec"], shell=options.shell), end="")


def complete(parser: ArgumentParser) -> None:
    """Prints the possible next words, for the shell that asks, and ends the process."""
    _get_argcomplete().autocomplete(parser, default_completer=_get_answers)


def _get_answers(prefix: str, action: Action, **_: Any) -> list[str]:
    """The words that an argument may be: topics, plans or other files."""
    if action.dest == TOPIC:
        return list(TOPICS)
    from argcomplete.completers import FilesCompleter

    if action.type is not plan_path:
        return list(FilesCompleter()(prefix))
    from ..syntax.package_data import SHIPPED, package_files

    if prefix.startswith(SHIPPED):
        return [name.removesuffix(".scale") for name in package_files()]
    return [*FilesCompleter(PLAN_SUFFIXES)(prefix), SHIPPED]


def _get_argcomplete() -> Any:
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise UsageError(
            "`scalec completion` needs argcomplete: pip install 'scalec[completion]'"
        ) from None
    return argcomplete


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="bash|zsh|fish", help="the shell")


COMMAND = Command(
    completion,
    _arguments,
    "Prints a script for bash, zsh or fish.  With it the Tab key completes commands, options,"
    " plan files and the\n"
    "names of plans that come with scalec (scalec:NAME).  Needs argcomplete: pip install"
    " 'scalec[completion]'.\n"
    'bash  eval "$(scalec completion bash)" in ~/.bashrc\n'
    'zsh   eval "$(scalec completion zsh)" in ~/.zshrc, after compinit\n'
    "fish  scalec completion fish > ~/.config/fish/completions/scalec.fish",
    "scalec completion bash",
)
