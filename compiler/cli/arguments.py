"""The commands in the order of the help, and what the command line makes of its words."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from .. import __version__
from . import (
    calibrate,
    compile,
    convert,
    diff,
    doctor,
    explain,
    fmt,
    ir,
    launch,
    log,
    lsp,
    new,
    plan,
    report,
    run,
    schedule,
    schema,
    verify,
)

COMMANDS = (
    new.COMMAND,
    compile.COMPILE,
    run.COMMAND,
    ir.COMMAND,
    compile.CHECK,
    explain.COMMAND,
    diff.COMMAND,
    plan.COMMAND,
    calibrate.COMMAND,
    launch.COMMAND,
    doctor.COMMAND,
    schedule.COMMAND,
    report.COMMAND,
    log.LOADS,
    log.LOG,
    convert.COMMAND,
    verify.COMMAND,
    schema.COMMAND,
    fmt.FORMAT,
    lsp.COMMAND,
    fmt.IMPORT,
)

EPILOG = """exit status:
  0  done
  1  the plan has errors, which are printed on standard error, or fails what the command checks
  2  the command line is wrong, or the output would overwrite files that scalec did not write

SCALEC_DUMP=<pass>|all prints the program after that pass, or after each, on standard error.
SCALEC_NO_CACHE=1 computes proofs and compiles anew that an earlier command has kept.
For details of a command: `scalec COMMAND --help`."""


def _parser() -> ArgumentParser:
    text = "scalec compiles declarative plans to readable distributed PyTorch training programs."
    parser = ArgumentParser(
        "scalec", description=text, epilog=EPILOG, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"scalec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for it in COMMANDS:
        sub = commands.add_parser(
            it.name,
            help=it.help,
            description=it.text,
            epilog=f"example:\n  {it.example}",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(command=it, parser=sub)
        it.arguments(sub)
    return parser


def _command_meant(word: str) -> str:
    """Help for a misspelt command, "" for any other word."""
    from ..syntax.diagnostics import did_you_mean

    names = [command.name for command in COMMANDS]
    return "" if word.startswith("-") or word in names else did_you_mean(word, names)


def options(words: list[str]) -> Namespace:
    """The options, with `command`, its `parser`, and as `rest` the words after `--`, positional ones to argparse."""
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    if meant := _command_meant(words[0] if words else ""):
        parser.error(f"unknown command `{words[0]}`: {meant}")
    given, unknown = parser.parse_known_args(words[:cut])
    if given.command is explain.COMMAND and not given.plan and unknown and not unknown[0].startswith("-"):
        given.plan = Path(unknown.pop(0))  # argparse gives up on an optional argument at the first option
    given.rest = words[cut + 1 :]
    passes_on = given.command.passes_on
    if unknown and unknown[0].startswith("-") and passes_on:
        how = "scalec run" if given.command is run.COMMAND else "scalec launch slurm"
        given.parser.error(f"`{unknown[0]}` goes to train.py, after `--`: {how} PLAN -- {unknown[0]} …")
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.rest and not passes_on:
        given.parser.error("only `scalec run` and `scalec launch` take arguments after `--`")
    return given
