"""The command line: `scalec compile | run | ir | check PLAN`.

Purpose: what each command does, how mistakes are shown, the exit status.
Non-goals: what is said of a plan (`summary`), how files are written (`emit.output`).

Made with argparse, which loads in 3 ms; what a command needs, attrs too, is imported when it runs, so that `--help` is
quick.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from . import __version__

if TYPE_CHECKING:
    from .diagnostics import PlanError
    from .ir import Program
    from .source import Source

PLAN_WRONG = 1
USAGE = 2
BUG = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED, BROKEN_PIPE = 128 + 2, 128 + 13  # as a shell reports a process that SIGINT or SIGPIPE ended


class UsageError(Exception):
    """What is asked for cannot be done, or not without harm, however right the plan is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, by default that of this process; returns the exit status."""
    options = _options(list(sys.argv[1:] if arguments is None else arguments))
    from .diagnostics import PlanError

    try:
        options.command(options)
        sys.stdout.flush()
        return 0
    except PlanError as error:
        return _plan_wrong(error)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return BROKEN_PIPE
    except Exception as error:
        return _bug(error)


# ---- the commands


def _compile(options: Namespace) -> None:
    from .summary import launch

    source, program = _load(options.plan)
    script = _write(program, source, options)
    how = launch(program)
    where = "" if how.nodes == 1 else f" this on each of {how.nodes:,} machines, $HEAD one of them"
    print(f"train with{where}:\n\n  {how.command(script)}")


def _run(options: Namespace) -> NoReturn:
    from importlib.util import find_spec

    from .summary import launch

    source, program = _load(options.plan)
    how = launch(program)
    if how.nodes > 1:
        raise UsageError(f"this plan runs on {how.nodes} machines: `scalec compile` prints what to start on each")
    if find_spec("torch") is None:
        raise UsageError(f"torch is not installed for {sys.executable}; training needs it")
    script = _write(program, source, options)
    sys.stdout.flush()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // how.ranks_per_node)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *how.options()]
    os.execv(sys.executable, [*torchrun, str(script), *options.rest])


def _ir(options: Namespace) -> None:
    from .diagnostics import listing
    from .passes import STAGES
    from .printer import print_ir

    stage = options.after or STAGES[-1]
    if stage not in STAGES:
        raise UsageError(f"there is no pass `{stage}`; in order they are {listing(STAGES)}")
    _, program = _load(options.plan, stage)
    if program.stage != stage:
        raise UsageError(f"`{options.plan}` is IR from after `{program.stage}`, which comes after `{stage}`")
    sys.stdout.write(print_ir(program))


def _check(options: Namespace) -> None:
    from .summary import headline

    _, program = _load(options.plan)
    print(f"ok  {headline(program)}")


def _load(plan: Path, stage: str | None = None) -> "tuple[Source, Program]":
    """The text of a plan or of IR, and its program after the pass `stage`, by default the last."""
    from .limits import load
    from .passes import STAGES, compile_plan, lower
    from .reader import is_ir

    source, stage = load(plan), stage or STAGES[-1]
    return source, lower(_read_ir(source), stage) if is_ir(source.text) else compile_plan(source, stage)


def _read_ir(source: "Source") -> "Program":
    """The program that IR text shows; text edited by hand may show an illegal one, which is no bug of scalec."""
    from .diagnostics import Diagnostic, Note, PlanError
    from .passes import STAGES
    from .reader import read_ir
    from .wellformed import check

    program = read_ir(source)
    try:
        assert program.stage in STAGES, f"there is no pass `{program.stage}`"
        check(program)
    except AssertionError as error:
        note = Note(None, str(error))
        raise PlanError([Diagnostic("E0190", "this IR is not legal", source.whole(), notes=(note,))]) from None
    return program


def _write(program: "Program", source: "Source", options: Namespace) -> Path:
    """Writes the files, says so with a summary, and returns the path of the program."""
    from .emit import emit
    from .emit.output import OutputError, write
    from .summary import communication, headline

    folder = options.output or Path("out", options.plan.stem)
    files = emit(program, source)
    try:
        write(folder, files)
    except OutputError as error:
        raise UsageError(str(error)) from error
    wrote = " and ".join(str(folder / name) for name in files)
    print(f"{headline(program)}\n\n{communication(program)}\n\nwrote {wrote}")
    return folder / "train.py"


# ---- what went wrong


def _plan_wrong(error: "PlanError") -> int:
    from .diagnostics import render, wants_colour

    colour = wants_colour(sys.stderr)
    print("\n\n".join(render(each, colour=colour) for each in error.diagnostics), file=sys.stderr)
    return PLAN_WRONG


def _bug(error: Exception) -> int:
    import traceback

    traceback.print_exception(error)
    said = f"{type(error).__name__}: {error}"
    print(f"\nthis is a bug in scalec, in {_culprit(error)}: {said}", file=sys.stderr)
    return BUG


def _culprit(error: Exception) -> str:
    """The pass in which an error arose, or else the module."""
    from traceback import walk_tb

    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
    ours = [name.removeprefix(f"{__package__}.") for name in modules if name.startswith(f"{__package__}.")]
    passes = [name.split(".")[1] for name in ours if name.startswith("passes.")]
    return f"pass `{passes[-1]}`" if passes else f"module `{ours[-1]}`"


# ---- the command line


class Command(NamedTuple):
    """A command: what it is called and does, in one line and in full, and an example."""

    name: str
    does: Callable[[Namespace], None]
    help: str
    text: str
    example: str


COMMANDS = (
    Command(
        "compile",
        _compile,
        "compile a plan to a training program",
        "Compiles a plan to DIR/train.py, a PyTorch program to read and run, and DIR/plan.json, its account.\n"
        "Says what a step communicates, and the command that starts the training.  Files that scalec did not\n"
        "write are never overwritten.",
        "scalec compile plans/tiny_llama.scale -o out/tiny_llama",
    ),
    Command(
        "run",
        _run,
        "compile a plan and train it on this machine",
        "Compiles a plan as `scalec compile` does, then starts it with torchrun on as many ranks as its mesh has.\n"
        "What stands behind `--` goes to train.py; `-- --help` says what it takes.",
        "scalec run plans/tiny_llama.scale -- --steps 100 --lr 1e-3",
    ),
    Command(
        "ir",
        _ir,
        "show the program between two passes",
        "Prints the intermediate representation of a plan after a pass, by default the last.  The text can be\n"
        "stored, edited and compiled in place of the plan.",
        "scalec ir plans/tiny_llama.scale --after insert_collectives",
    ),
    Command(
        "check",
        _check,
        "say whether a plan is right",
        "Compiles a plan without writing anything: says `ok` with the model's size, or what is wrong with it.",
        "scalec check plans/llama3_405b.scale",
    ),
)

EPILOG = """exit status:
  0  done
  1  the plan is wrong; what is wrong with it is on standard error
  2  the command line is wrong, or the output would overwrite what scalec did not write

SCALEC_DUMP=<pass>|all prints the program after that pass, or each, on standard error.
`scalec COMMAND --help` says more of a command."""


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
        sub.set_defaults(command=it.does)
        _add_arguments(sub, it.name)
    return parser


def _add_arguments(parser: ArgumentParser, command: str) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan (.scale), or IR text that `scalec ir` printed")
    if command in ("compile", "run"):
        help = "the folder to write to (default out/ and the plan's name)"
        parser.add_argument("-o", "--output", type=Path, metavar="DIR", help=help)
    if command == "run":
        parser.usage = "scalec run [-h] [-o DIR] PLAN [-- ARGUMENT ...]"
    if command == "ir":
        parser.add_argument("--after", metavar="PASS", help="the pass; an unknown one lists them all")


def _options(words: list[str]) -> Namespace:
    """The options, with what stands behind `--` as `rest`: argparse would not know it from positional arguments."""
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    options = parser.parse_args(words[:cut])
    options.rest = words[cut + 1 :]
    if options.rest and options.command is not _run:
        parser.error("arguments behind `--` are for `scalec run` alone")
    return options
