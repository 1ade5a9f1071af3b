"""The words of a command line become a command and its options, or help."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Container
from pathlib import Path

from .. import __version__
from .command import plan_path
from .commands import COMMANDS

WISHES = {
    "train resume restart finetune start fit": (
        "`scalec run PLAN` compiles a plan and trains it, or resumes its run"
    ),
    "init create scaffold": "`scalec new mine.scale` writes a first plan",
    "build generate-code codegen emit transpile": (
        "`scalec compile PLAN` writes the training program"
    ),
    "validate lint test typecheck": "`scalec check PLAN` finds the mistakes of a plan, "
    "`scalec verify PLAN` proves its step",
    "prove proof": "`scalec verify PLAN` proves that the sharded step is the single-device step",
    "format": "`scalec fmt PLAN` formats a plan",
    "memory estimate profile time cost mfu collectives": (
        "`scalec explain memory PLAN`, `explain time` and "
        "`explain collectives` say what a step needs"
    ),
    "search tune optimize autotune auto": (
        "`scalec plan MODEL --gpus 64 --cluster h100_sxm` finds the fastest plans"
    ),
    "draw plot visualize show view": (
        "`scalec report PLAN -o report.html` draws a plan, `scalec log RUN` a run"
    ),
    "loss losses metrics logs tensorboard": "`scalec log RUN` draws the losses of a run",
    "submit slurm sbatch k8s kubernetes": (
        "`scalec launch slurm PLAN` writes the script of a job; `k8s` for Kubernetes"
    ),
    "export": "`python out/NAME/train.py --export FOLDER` writes a checkpoint as safetensors",
    "generate sample infer inference serve chat eval evaluate": (
        "scalec trains; for text from a model export it, "
        "`python out/NAME/train.py --export FOLDER`, and load that elsewhere"
    ),
    "list ls models examples": "`scalec plans` lists the plans that come with scalec",
    "download pull hf": (
        "`scalec import config.json -o mine.scale` writes a plan for a Hugging Face model"
    ),
    "bench benchmark measure": "`scalec calibrate PLAN -o my_cluster.toml` measures this machine "
    "at the shapes of a plan",
    "env info check-env setup install": "`scalec doctor` checks this machine",
}
"""Words that other programs have for commands, and the command that does it."""

SHELL_ASKS = "_ARGCOMPLETE"
"""The variable of the environment that argcomplete's scripts set."""

INSTEAD = {"help": "--help", "version": "--version"}
"""Words that stand for an option."""

EPILOG = """exit status:
  0  done
  1  the plan has errors, which are printed on standard error, or fails what the command checks
  2  the command line is wrong, or the output would overwrite files that scalec did not write

SCALEC_DUMP=<pass>|all prints the program after that pass, or after each, on standard error.
SCALEC_NO_CACHE=1 computes proofs and compiles anew that an earlier command has kept.
For details of a command: `scalec COMMAND --help`."""


def _parser(names: Container[str]) -> ArgumentParser:
    """The parser of all commands; only the named ones are loaded and have arguments."""
    text = "scalec compiles declarative plans to readable distributed PyTorch training programs."
    parser = ArgumentParser(
        "scalec",
        description=text,
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"scalec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in COMMANDS:
        if entry.name not in names:
            commands.add_parser(entry.name, help=entry.help)
            continue
        command = entry.load()
        command_parser = commands.add_parser(
            entry.name,
            help=entry.help,
            description=command.text,
            epilog=f"example:\n  {command.example}",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.arguments(command_parser)
        command_parser.set_defaults(command=command, command_name=entry.name, parser=command_parser)
    return parser


def _complete() -> None:
    """Answers a shell that asks what may follow the words so far, and ends the process."""
    from .completion import complete

    complete(_parser([entry.name for entry in COMMANDS]))


def _command_meant(word: str) -> str:
    """Help for a command of another program or a misspelt one, "" for any other word."""
    names = [entry.name for entry in COMMANDS]
    if word.startswith("-") or word in names:
        return ""
    from ..syntax.diagnostics import did_you_mean

    wish = next((help for words, help in WISHES.items() if word.lower() in words.split()), "")
    return wish or did_you_mean(word, names)


def _with_options(words: list[str]) -> list[str]:
    """The words, with `--help` for `help` and for `help COMMAND`, and `--version` for `version`."""
    if not words or words[0] not in INSTEAD:
        return words
    return [*words[1:2], INSTEAD[words[0]]]


def _plan_given(parser: ArgumentParser, word: str) -> Path:
    try:
        return plan_path(word)
    except ArgumentTypeError as error:
        parser.error(f"argument PLAN: {error}")


def options(words: list[str]) -> Namespace:
    """The options, with `command`, its `parser`, and as `rest` the words after `--`, positional
    ones to argparse.
    """
    words = _with_options(words)
    cut = words.index("--") if "--" in words else len(words)
    if SHELL_ASKS in os.environ:
        _complete()
    parser = _parser(words[:cut])
    if suggestion := _command_meant(words[0] if words else ""):
        parser.error(f"unknown command `{words[0]}`: {suggestion}")
    arguments, unknown = parser.parse_known_args(words[:cut])
    command, name = arguments.command, arguments.command_name
    error = arguments.parser.error
    starts_with_option = bool(unknown) and unknown[0].startswith("-")
    if name == "explain" and not arguments.plan and unknown and not starts_with_option:
        # argparse gives up on an optional argument at the first option
        arguments.plan = _plan_given(arguments.parser, unknown.pop(0))
    arguments.rest = words[cut + 1 :]
    if starts_with_option and command.passes_on:
        how = "scalec run" if name == "run" else "scalec launch slurm"
        error(f"`{unknown[0]}` goes to train.py, after `--`: {how} PLAN -- {unknown[0]} …")
    if unknown:
        error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.rest and not command.passes_on:
        error("only `scalec run` and `scalec launch` take arguments after `--`")
    return arguments
