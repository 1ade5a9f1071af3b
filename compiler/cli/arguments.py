"""What the command line takes, and what it says of itself."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .. import __version__
from . import compile, import_hf, schedule, verify
from .fmt import fmt


class Command(NamedTuple):
    """A command: what it is called and does, in one line and in full, and an example."""

    name: str
    does: Callable[[Namespace], int | None]
    help: str
    text: str
    example: str


COMMANDS = (
    Command(
        "compile",
        compile.compile_,
        "compile a plan to a training program",
        "Compiles a plan to DIR/train.py, a PyTorch program to read and run, and DIR/plan.json, its account.\n"
        "Says what a step communicates, and the command that starts the training.  Files that scalec did not\n"
        "write are never overwritten.",
        "scalec compile plans/tiny_llama.scale -o out/tiny_llama",
    ),
    Command(
        "run",
        compile.run,
        "compile a plan and train it on this machine",
        "Compiles a plan as `scalec compile` does, then starts it with torchrun on as many ranks as its mesh has.\n"
        "What stands behind `--` goes to train.py; `-- --help` says what it takes.",
        "scalec run plans/tiny_llama.scale -- --steps 100 --lr 1e-3",
    ),
    Command(
        "ir",
        compile.ir,
        "show the program between two passes",
        "Prints the intermediate representation of a plan after a pass, by default the last.  The text can be\n"
        "stored, edited and compiled in place of the plan; as a graph it is for Graphviz or networkx.",
        "scalec ir plans/tiny_llama.scale --after insert_collectives",
    ),
    Command(
        "check",
        compile.check,
        "say whether a plan is right",
        "Compiles a plan without writing anything: says `ok` with the model's size and the tokens of a step, or what\n"
        "is wrong with it; warns where it does not fit its GPU, with what would make it fit.",
        "scalec check plans/llama3_405b.scale",
    ),
    Command(
        "explain",
        compile.explain,
        "show what memory a plan takes, or what its ranks send each other",
        "memory: what one rank holds at the fullest moment of a step, which moment that is, and what forward keeps\n"
        "for backward by op and line of the plan; whether it fits the GPU that the plan's cluster names.\n"
        "collectives: what a step gathers, reduces and exchanges, where and how often; what a rank sends in it,\n"
        "within a node and across nodes.",
        "scalec explain memory plans/llama3_405b.scale",
    ),
    Command(
        "schedule",
        schedule.schedule,
        "draw what each rank of a plan's pipeline does when",
        "Draws the schedule of a plan's pipeline as a row for each rank, with how long each computes, waits, and how\n"
        "much it holds; or writes it to files.  Times are for a stage and a microbatch: `f` of forward, `b` and `w`\n"
        "of the input and weight parts of backward, `comm` of a message between ranks.  By default they are what\n"
        "stages cost, in parts of the dearest forward, and messages take none.",
        "scalec schedule plans/tiny_pipeline.scale --times f=1,b=1,w=1,comm=0.1",
    ),
    Command(
        "verify",
        verify.verify,
        "prove that a plan's sharded step is the single-device step",
        "Evaluates the step that a plan compiles to, on small sizes and for all ranks, in a prime field, and holds\n"
        "loss, every gradient and every updated parameter to the step of a single device: equal, or the first value\n"
        "that is not.  Of two plans, says whether they make the same update.",
        "scalec verify plans/llama3_405b.scale",
    ),
    Command(
        "fmt",
        fmt,
        "lay out plans in one style",
        "Rewrites plans with the indentation, spaces and alignment of those in plans/; names each that changed.\n"
        "Every word and every comment stays, in its order.  A plan with syntax errors is left alone.",
        "scalec fmt plans/tiny_llama.scale",
    ),
    Command(
        "import",
        import_hf.import_,
        "write a plan for a Hugging Face model",
        "Writes the plan of a model from its config.json, or says which of its fields no plan expresses.  With its\n"
        "weights the program begins by `train.py --init FOLDER`.",
        "scalec import config.json -o plan.scale",
    ),
)

MODES = {
    "audit": "break the step in every way that it can break, and count which the proof catches",
    "recheck": "PLAN is a folder that scalec compiled to: show once more all that its certificate says",
    "recorded": "PLAN is a folder where a run lies with SCALEC_RECORD=1: hold what it communicated to the plan",
}
"""What else `verify` does, as options of it."""

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


def _path(text: str) -> Path:
    if not text:
        raise ArgumentTypeError("it is empty: name a file or a folder")
    return Path(text)


def _add_arguments(parser: ArgumentParser, command: str) -> None:
    if command == "import":
        parser.add_argument("config", type=_path, metavar="CONFIG", help="the config.json of a model")
        help = "the plan to write (default: standard output)"
        parser.add_argument("-o", "--output", type=_path, metavar="FILE", help=help)
        return
    if command == "fmt":
        help = "a plan (.scale), or `-` for standard input, which goes to standard output"
        parser.add_argument("files", type=_path, nargs="+", metavar="FILE", help=help)
        help = "write nothing; name the plans that would change, with exit status 1"
        parser.add_argument("--check", action="store_true", help=help)
        return
    text = "a plan (.scale), or IR text that `scalec ir` printed"
    if command == "verify":
        parser.add_argument("plans", type=_path, nargs="+", metavar="PLAN", help=f"{text}; two to hold them together")
        for name, help in MODES.items():
            parser.add_argument(f"--{name}", action="store_true", help=help)
        return
    if command == "explain":
        parser.add_argument("topic", choices=("memory", "collectives"), help="what to show")
    parser.add_argument("plan", type=_path, metavar="PLAN", help=text)
    if command == "schedule":
        help = "some of f=1,b=1,w=1,comm=0.1: the same for all stages"
        parser.add_argument("--times", default="", metavar="TIMES", help=help)
        parser.add_argument("--unit", action="store_true", help="draw all stages as if they took f=1,b=1,w=1")
        for form, help in schedule.FORMS.items():
            parser.add_argument(f"--{form}", type=_path, metavar="FILE", help=f"write {help}")
    if command == "check":
        help = "end with exit status 1 unless it fits the GPU that the plan's cluster names"
        parser.add_argument("--must-fit", action="store_true", help=help)
    if command in ("compile", "run"):
        help = "the folder to write to (default out/ and the plan's name)"
        parser.add_argument("-o", "--output", type=_path, metavar="DIR", help=help)
        help = "write without evaluating the step, and say so in what is written"
        parser.add_argument("--no-verify", dest="verify", action="store_false", help=help)
    if command == "run":
        parser.usage = "scalec run [-h] [-o DIR] [--no-verify] PLAN [-- ARGUMENT ...]"
    if command == "ir":
        parser.add_argument("--after", metavar="PASS", help="the pass; an unknown one lists them all")
        help = "print a graph in place of IR text: ops and regions are nodes, values with their types edges"
        parser.add_argument("--graph", choices=("dot", "graphml", "json"), help=help)


def _command_meant(word: str) -> str:
    """Help for a misspelt command, "" for any other word."""
    from ..syntax.diagnostics import did_you_mean

    names = [command.name for command in COMMANDS]
    return "" if word.startswith("-") or word in names else did_you_mean(word, names)


def options(words: list[str]) -> Namespace:
    """The options, with what stands behind `--` as `rest`: argparse would not know it from positional arguments."""
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    if meant := _command_meant(words[0] if words else ""):
        parser.error(f"there is no command `{words[0]}`: {meant}")
    given, unknown = parser.parse_known_args(words[:cut])
    given.rest = words[cut + 1 :]
    if unknown and unknown[0].startswith("-") and given.command is compile.run:
        parser.error(f"`{unknown[0]}` goes to train.py, after `--`: scalec run PLAN -- {unknown[0]} …")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.rest and given.command is not compile.run:
        parser.error("arguments behind `--` are for `scalec run` alone")
    return given
