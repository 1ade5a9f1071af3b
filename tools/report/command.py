"""The command `report`: a plan, or two side by side, as a page."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from ...compiler.cli.command import PLAN, Command, file_path, plan_path, verify_arguments
from ...compiler.cli.compile import load
from ...compiler.cli.output import UsageError, put
from ...compiler.tuning.advice import make_report_with_advice
from . import MARK, Subject
from . import report as page_of


def report(options: Namespace) -> None:
    """`scalec report`."""
    if len(options.plans) > 2:
        raise UsageError("report takes one plan, or two to compare")
    subjects = [
        subject(path, proved=options.verify, cached=options.cache, advised=options.advice)
        for path in options.plans
    ]
    page = page_of(*subjects, tokens=options.tokens)
    path = options.output or Path(f"{options.plans[0].stem}.html")
    put(path, page, "output", MARK)


def subject(path: Path, *, proved: bool, cached: bool = False, advised: bool = False) -> "Subject":
    """The subject of a report for a plan.

    If `cached`, its proof is the one that an earlier command kept; if `advised`, the subject has
    the faster neighbours of the plan.
    """
    plan = load(path)
    proof = plan.get_proof(cached=cached) if proved else None
    result = Subject(plan.source, plan.model, plan.program, proof=proof)
    if advised and result.time:
        return _with_neighbours(result)
    return result


def _with_neighbours(subject: "Subject") -> "Subject":
    from attrs import evolve

    assert subject.time is not None, "report: advice on a time that is not known"
    report = make_report_with_advice(subject.time, subject.model, subject.source)
    return evolve(subject, neighbours=report.neighbours)


def _tokens(text: str) -> float:
    """A number with a letter for thousands, millions and so on."""
    letter = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}.get(text[-1:].upper())
    try:
        number = float(text[:-1]) * letter if letter else float(text.replace("_", ""))
    except ValueError:
        number = 0.0
    if not 0 < number < 1e18:
        raise ArgumentTypeError(f"`{text}` is not a number of tokens, as 300B or 15T")
    return number


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "plans", type=plan_path, nargs="+", metavar="PLAN", help=f"{PLAN}; two plans are compared"
    )
    help = "the page to write (default: the plan's name with .html)"
    parser.add_argument("-o", "--output", type=file_path, metavar="FILE", help=help)
    help = "the tokens to train on, as 15T (default: those of the plan's steps)"
    parser.add_argument("--tokens", type=_tokens, metavar="D", help=help)
    help = "add the faster plans that `scalec explain time` finds"
    parser.add_argument("--advice", action="store_true", help=help)
    verify_arguments(parser, "the page")


COMMAND = Command(
    report,
    _arguments,
    "Writes one page, which needs no network: the mesh on its machines, the model with its"
    " shards and collectives,\n"
    "memory over a step, the pipeline, operations, seconds, days of training, the certificate,"
    " and the plan's text\n"
    "with notes.  For two plans, their differences too.",
    "scalec report plans/llama3_70b.scale -o report.html",
)
