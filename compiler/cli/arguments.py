"""The arguments and help texts of the command line."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .. import __version__
from . import calibrate, compile, diff, doctor, explain, launch, loads, plan, run, schedule, verify
from .fmt import fmt, import_


class Command(NamedTuple):
    """A command: its name, what it does, in one line and in full, and an example."""

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
        "Compiles a plan to DIR/train.py, a readable PyTorch program, and DIR/plan.json, its collectives and memory;\n"
        "the program reads DIR/schedule.csv, of a pipeline, DIR/tiles.json, of Triton kernels, and DIR/hf_names.json,\n"
        "Hugging Face's names.\n"
        "Prints what a step communicates and the command that starts training.  Never overwrites files that\n"
        "scalec did not write.",
        "scalec compile plans/tiny_llama.scale -o out/tiny_llama",
    ),
    Command(
        "run",
        run.run,
        "compile a plan and train it on this machine, or go on with its run",
        "Compiles a plan as `scalec compile` does, or takes a compiled train.py, and starts it with torchrun, one\n"
        "process per rank of its mesh.  The run goes on from its newest checkpoint, if there is one: the same line\n"
        "starts it and takes it further, and ends at once where it has finished.\n"
        "Arguments after `--` go to train.py; `-- --help` lists them.  Exit status 75 where SIGTERM or SIGUSR1 has\n"
        "ended the run after a save, 130 where Ctrl-C has.",
        "scalec run plans/tiny_llama.scale -- --steps 100 --lr 1e-3",
    ),
    Command(
        "ir",
        compile.ir,
        "show the program between two passes",
        "Prints the intermediate representation of a plan after a pass, by default the last.  The text can be\n"
        "saved, edited and compiled instead of the plan; as a graph it is for Graphviz or networkx.",
        "scalec ir plans/tiny_llama.scale --after insert_collectives",
    ),
    Command(
        "check",
        compile.check,
        "check a plan for errors",
        "Compiles a plan without writing anything.  Prints `ok`, the model's size and the tokens per step, or the\n"
        "plan's errors.  If the plan does not fit its GPU, warns and lists changes that would make it fit.",
        "scalec check plans/llama3_405b.scale",
    ),
    Command(
        "explain",
        explain.explain,
        "show the memory, the collectives or the time of a plan, or the meaning of a code",
        "memory: peak memory of one rank, where in the step it occurs, and saved activations by op and plan line;\n"
        "whether it fits the GPU named in the plan's cluster.\n"
        "collectives: the collectives of a step, where and how often they run, and the bytes a rank sends,\n"
        "within a node and across nodes.\n"
        "time: the seconds of a step on the GPUs of the plan's cluster, on what and at which lines they are spent,\n"
        "tokens/s/GPU and MFU; what limits it, and which plans with one setting changed take less.\n"
        "A code such as E0510: its meaning, with a wrong and a right plan.",
        "scalec explain memory plans/llama3_405b.scale",
    ),
    Command(
        "diff",
        diff.diff,
        "show two plans side by side",
        "Shows where two plans differ: where parameters and values lie, collectives, the bytes that a rank sends, its\n"
        "memory, and the seconds of a step where their GPUs are known.  Exits with status 1 if they differ.\n"
        "Of a pipeline, collectives are those of the rank that sends most, memory that of the rank that needs most.",
        "scalec diff plans/llama3_70b.scale mine.scale",
    ),
    Command(
        "plan",
        plan.plan,
        "find the best plans of a model for a number of GPUs",
        "Finds the plans of a model that train it fastest on a number of GPUs: degrees of all axes, microbatch,\n"
        "sharded state, recomputation, pipeline schedule.  Prints the best, compiled and proved, with their time and\n"
        "memory, why the first is as it is, each reason a comparison with another plan, and its text.\n"
        "Exits with status 1 if nothing fits.",
        "scalec plan plans/llama3_8b.scale --gpus 64 --cluster h100_sxm --global-batch 256 --seq 8192",
    ),
    Command(
        "calibrate",
        calibrate.calibrate,
        "measure this machine at the shapes of some plans",
        "Measures products, attention, memory-bound ops, the host and the links between ranks, at the shapes and in\n"
        'the groups of the plans, and writes FILE, for `cluster { hardware = "FILE" }`.  Runs on this machine, one\n'
        "process per rank; for several nodes it prints the command to run on each.  With --fit it measures nothing,\n"
        "and says by line where a run's profile differs from the prediction, and which figures would explain it.",
        "scalec calibrate plans/tiny_llama.scale -o my_cluster.toml",
    ),
    Command(
        "launch",
        launch.launch,
        "write the script that trains a plan on a cluster",
        "Compiles a plan as `scalec compile` does, and writes DIR/job.sbatch, for Slurm, or DIR/job.yaml, for\n"
        "Kubernetes, for the nodes, GPUs and memory of the plan.  The job first runs the checks of `scalec doctor` on\n"
        "all nodes, goes on from its newest checkpoint, and goes back into the queue before its time ends and after a\n"
        "node has failed.\n"
        "Arguments after `--` go to train.py.",
        "scalec launch slurm plans/llama3_8b.scale --time 24:00:00 -- --save-every 200",
    ),
    Command(
        "doctor",
        doctor.doctor,
        "look at the machines that are to train a plan",
        "Compares versions, clocks, GPUs, links, ports, the run's folder, disk and limits with each other and with\n"
        "the needs of the plan, a line each: ok, warn or fail, and what to do.  Looks at this machine, with a process\n"
        "for each rank of a node; under torchrun --no-python, at all nodes.  Exits with status 1 if anything failed.",
        "scalec doctor plans/tiny_llama.scale",
    ),
    Command(
        "schedule",
        schedule.schedule,
        "draw the pipeline schedule of a plan",
        "Draws the pipeline schedule of a plan, one row per rank, with each rank's busy time, idle time and memory;\n"
        "or writes it to files.  Times are per stage and microbatch: `f` for forward, `b` and `w` for the input and\n"
        "weight gradients of backward, `comm` for a message between ranks.  By default they are estimated costs,\n"
        "relative to the most expensive forward, and messages take no time.",
        "scalec schedule plans/tiny_pipeline.scale --times f=1,b=1,w=1,comm=0.1",
    ),
    Command(
        "loads",
        loads.loads,
        "draw the loads of experts in a run",
        "Draws which experts the tokens of a run chose, from its log: the least and the most load of each layer at\n"
        "some steps; or writes a picture of all experts over all logged steps.  A load is an expert's part of the\n"
        "choices of its layer, in equal shares: 1 where all experts are chosen as often.",
        "scalec loads runs/08_experts --svg loads.svg",
    ),
    Command(
        "verify",
        verify.verify,
        "prove that a plan's sharded step is the single-device step",
        "Evaluates the compiled step for all ranks, at small sizes and in a prime field, and checks the loss, every\n"
        "gradient and every updated parameter against the single-device step.  Prints `equal` or the first value\n"
        "that differs.  With two plans, checks that both make the same update.",
        "scalec verify plans/llama3_405b.scale",
    ),
    Command(
        "fmt",
        fmt,
        "format plans",
        "Formats plans with the indentation, spacing and alignment used in plans/, and names each file it changed.\n"
        "Words and comments stay as they are, in the same order.  A plan with syntax errors is left alone.",
        "scalec fmt plans/tiny_llama.scale",
    ),
    Command(
        "import",
        import_,
        "write a plan for a Hugging Face model",
        "Writes a plan for the model of a config.json, or names the fields that no plan can express.  To start\n"
        "training from the model's weights, run `train.py --init FOLDER`.",
        "scalec import config.json -o plan.scale",
    ),
)

MODES = {
    "audit": "break the step in hundreds of ways and count how many the proof catches",
    "recheck": "PLAN is a compiled output folder: re-check every claim of its certificate",
    "recorded": "PLAN is a run folder recorded with SCALEC_RECORD=1: check its communication against the plan",
}
"""Other modes of `verify`, as options."""

EPILOG = """exit status:
  0  done
  1  the plan has errors, which are printed on standard error
  2  the command line is wrong, or the output would overwrite files that scalec did not write

SCALEC_DUMP=<pass>|all prints the program after that pass, or after each, on standard error.
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
        sub.set_defaults(command=it.does, parser=sub)
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
        help = "a plan (.scale), or `-` to read standard input and write standard output"
        parser.add_argument("files", type=_path, nargs="+", metavar="FILE", help=help)
        help = "write nothing; name the plans that would change and exit with status 1"
        parser.add_argument("--check", action="store_true", help=help)
        return
    if command == "loads":
        parser.add_argument("run", type=_path, metavar="RUN", help="the folder of a run, or its log.jsonl")
        parser.add_argument("--svg", type=_path, metavar="FILE", help="write a picture")
        return
    if command == "plan":
        _add_plan_arguments(parser)
        return
    text = "a plan (.scale), or IR text that `scalec ir` printed"
    if command == "doctor":
        parser.add_argument(
            "plan", type=_path, nargs="?", metavar="PLAN", help=f"{text}; without one, nothing is needed"
        )
        help = "the run's folder (default: runs/ and the plan's name)"
        parser.add_argument("--out", type=_path, metavar="DIR", help=help)
        parser.add_argument("--json", action="store_true", help="print JSON, with the report of each rank")
        return
    if command == "launch":
        parser.add_argument("scheduler", choices=launch.SCHEDULERS, metavar="slurm|k8s", help="the cluster's scheduler")
        _add_launch_arguments(parser)
    if command == "diff":
        parser.add_argument("plans", type=_path, nargs=2, metavar="PLAN", help=text)
        parser.add_argument("--all", action="store_true", help="show what is equal too")
        parser.add_argument("--json", action="store_true", help="print JSON: both figures by section and name")
        return
    if command == "verify":
        parser.add_argument("plans", type=_path, nargs="+", metavar="PLAN", help=f"{text}; two plans are compared")
        for name, help in MODES.items():
            parser.add_argument(f"--{name}", action="store_true", help=help)
        return
    if command == "calibrate":
        parser.add_argument("plans", type=_path, nargs="+", metavar="PLAN", help=text)
        help = "the file to write (default my_cluster.toml); beside it lies the list of what is measured"
        parser.add_argument("-o", "--output", type=_path, metavar="FILE", help=help)
        parser.add_argument("--quick", action="store_true", help="no long warm-up, and only small messages")
        parser.add_argument("--print", action="store_true", help="measure nothing; print the command that does")
        help = "measure nothing; compare the prediction with steps that a run wrote to FOLDER, its SCALEC_PROFILE"
        parser.add_argument("--fit", type=_path, metavar="FOLDER", help=help)
        return
    if command == "explain":
        _add_explain_arguments(parser, text)
        return
    parser.add_argument("plan", type=_path, metavar="PLAN", help=text)
    if command == "schedule":
        help = "any of f=1,b=1,w=1,comm=0.1, for all stages"
        parser.add_argument("--times", default="", metavar="TIMES", help=help)
        parser.add_argument("--unit", action="store_true", help="draw every stage with f=1,b=1,w=1")
        for form, help in schedule.FORMS.items():
            parser.add_argument(f"--{form}", type=_path, metavar="FILE", help=f"write {help}")
    if command == "check":
        help = "exit with status 1 unless the plan fits the GPU named in its cluster"
        parser.add_argument("--must-fit", action="store_true", help=help)
    if command in ("compile", "run", "launch"):
        help = "the folder to write to (default: out/ and the plan's name)"
        parser.add_argument("-o", "--output", type=_path, metavar="DIR", help=help)
        help = "skip the proof, and say so in the written files"
        parser.add_argument("--no-verify", dest="verify", action="store_false", help=help)
    if command == "run":
        _add_run_arguments(parser)
    if command == "ir":
        parser.add_argument("--after", metavar="PASS", help="the pass; an unknown name lists all passes")
        help = "print a graph in place of IR text: ops and regions are nodes, values with their types edges"
        parser.add_argument("--graph", choices=("dot", "graphml", "json"), help=help)


def _add_run_arguments(parser: ArgumentParser) -> None:
    parser.usage = "scalec run [-h] [-o DIR] [--no-verify] [--max-restarts N] [--anew] PLAN|train.py [-- ARGUMENT ...]"
    help = "how often all ranks start anew, from the newest checkpoint, after one has failed (default: 0)"
    parser.add_argument("--max-restarts", type=_count, default=0, metavar="N", help=help)
    help = "begin, though there is a checkpoint: an earlier run's files are moved into a folder beside it"
    parser.add_argument("--anew", action="store_true", help=help)


def _add_launch_arguments(parser: ArgumentParser) -> None:
    parser.usage = "scalec launch [-h] [OPTION ...] slurm|k8s PLAN [-- ARGUMENT ...]"
    help = "Slurm: the time limit, after which the job goes back into the queue (default: %(default)s)"
    parser.add_argument("--time", default="24:00:00", metavar="H:M:S", help=help)
    help = "seconds in which a checkpoint can be saved before a job ends (default: %(default)s)"
    parser.add_argument("--grace", type=_count, default=120, metavar="S", help=help)
    help = "CPUs of a rank (default: %(default)s)"
    parser.add_argument("--cpus", type=_count, default=8, metavar="N", help=help)
    help = "Slurm: one more option of sbatch, as --sbatch=--partition=gpu; may be repeated"
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=help)
    help = "Kubernetes: the image, with scalec in it and the program in its working directory, if not on the volume"
    parser.add_argument("--image", default="", metavar="IMAGE", help=help)
    help = "Kubernetes: the claim of the shared volume with program, data and runs (default: %(default)s)"
    parser.add_argument("--claim", default="shared", metavar="NAME", help=help)


def _add_explain_arguments(parser: ArgumentParser, text: str) -> None:
    parser.add_argument("topic", metavar="TOPIC", help="memory, collectives, time, or a code such as E0510")
    parser.add_argument("plan", type=_path, nargs="?", metavar="PLAN", help=f"{text}; not for a code")
    help = "of a mesh with a range, such as dp = 4..8: the size to explain (default: the largest)"
    parser.add_argument("--size", type=_count, metavar="N", help=help)
    parser.add_argument("--json", action="store_true", help="of time: print JSON")
    parser.add_argument("--lines", action="store_true", help="of time: print a table of all ops")
    parser.add_argument("--csv", type=_path, metavar="FILE", help="of time: write all ops as CSV")
    help = "of time: print which ops make the step as long as it is, and how much slower others may be"
    parser.add_argument("--critical", action="store_true", help=help)
    help = "of time: write the step as a trace for ui.perfetto.dev"
    parser.add_argument("--trace", type=_path, metavar="FILE", help=help)
    help = "of time: beside it, by plan line, steps that a run wrote to this folder, its SCALEC_PROFILE"
    parser.add_argument("--against", type=_path, metavar="FOLDER", help=help)
    help = "of time: name no plans with one setting changed, which takes most of the time"
    parser.add_argument("--no-advice", action="store_true", help=help)


def _add_plan_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=_path, metavar="MODEL", help="a model (.scale), or a plan whose model is meant")
    parser.add_argument("--gpus", type=_count, metavar="N", help="how many GPUs there are")
    parser.add_argument("--cluster", metavar="C", help="a GPU such as h100_sxm, or a file of figures (.toml)")
    help = "GPUs of a node (default: those of the cluster's file, or 8)"
    parser.add_argument("--gpus-per-node", type=_count, metavar="N", help=help)
    parser.add_argument("--global-batch", type=_count, metavar="B", help="sequences of a step (default: the plan's)")
    parser.add_argument("--seq", type=_count, metavar="S", help="tokens of a sequence (default: the plan's)")
    parser.add_argument("--keep", default="", metavar="CHOICES", help="fix choices, for instance tp=8,zero=3")
    parser.add_argument("--top", type=_count, default=5, metavar="K", help="plans to show and prove (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    help = (
        "the best plan at each of many points, as gpus=8..16384, seq=4096:8192, cluster=h100_sxm:h200, or two of them"
    )
    parser.add_argument("--sweep", default="", metavar="AXES", help=help)
    parser.add_argument("--csv", type=_path, metavar="FILE", help="write the points of a sweep")
    parser.add_argument("--svg", type=_path, metavar="FILE", help="write a picture of a sweep: curves, or a heat map")
    help = "write the first plan, with a comment on each choice"
    parser.add_argument("-o", "--output", type=_path, metavar="FILE", help=help)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"`{text}` is not a whole number above 0")
    return int(text)


def _command_meant(word: str) -> str:
    """Help for a misspelt command, "" for any other word."""
    from ..syntax.diagnostics import did_you_mean

    names = [command.name for command in COMMANDS]
    return "" if word.startswith("-") or word in names else did_you_mean(word, names)


def options(words: list[str]) -> Namespace:
    """The options with the command's `parser`, and as `rest` the words after `--`, positional ones to argparse."""
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    if meant := _command_meant(words[0] if words else ""):
        parser.error(f"unknown command `{words[0]}`: {meant}")
    given, unknown = parser.parse_known_args(words[:cut])
    if given.command is explain.explain and not given.plan and unknown and not unknown[0].startswith("-"):
        given.plan = Path(unknown.pop(0))  # argparse gives up on an optional argument at the first option
    given.rest = words[cut + 1 :]
    passes_on = given.command in (run.run, launch.launch)
    if unknown and unknown[0].startswith("-") and passes_on:
        how = "scalec run" if given.command is run.run else "scalec launch slurm"
        given.parser.error(f"`{unknown[0]}` goes to train.py, after `--`: {how} PLAN -- {unknown[0]} …")
    if unknown:
        given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if given.rest and not passes_on:
        given.parser.error("only `scalec run` and `scalec launch` take arguments after `--`")
    return given
