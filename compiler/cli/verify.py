"""The command `verify`: a plan, two plans, an output folder, a recorded run, or the verifier
itself.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from textwrap import fill
from time import perf_counter

from .command import PLAN, Command, plan_path
from .compile import Plan, load
from .output import PLAN_WRONG, UsageError, show


def verify(options: Namespace) -> int:
    """`scalec verify`; returns the exit status."""
    modes = {"audit": _audit, "recheck": _recheck, "recorded": _verify_recorded}
    chosen = [mode for mode in modes if getattr(options, mode)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} exclude each other: choose one")
    first, *others = options.plans
    if len(others) > 1 or (others and chosen):
        raise UsageError("verify takes one plan, or two to compare")
    if chosen:
        return modes[chosen[0]](first)
    return _two(first, others[0]) if others else _plan(first)


def _plan(path: Path) -> int:
    began = perf_counter()
    plan = load(path)
    proof = plan.get_proof()
    show(f"equal  {_headline(plan)}\n\n{proof.lines()}\n{'time':<9} {perf_counter() - began:.2f} s")
    return 0


def _two(first: Path, second: Path) -> int:
    from ..proof.compare_plans import COMPARED, NOT_COMPARED, hold_alike, unlike

    plans = load(first), load(second)
    proofs = [plan.get_proof() for plan in plans]
    hold_alike(plans[0].model, plans[1].model)
    print(f"equal  {first} and {second} make the same update\n")
    for plan, proof in zip(plans, proofs, strict=True):
        print(f"  {_headline(plan)}\n    {proof.summary()}\n")
    differing = (
        "; ".join(unlike(plans[0].model, plans[1].model))
        or "no setting of `train`, nor how parameters begin"
    )
    for head, text in (
        ("compared", COMPARED),
        ("not compared", NOT_COMPARED),
        ("differing", differing),
    ):
        print(fill(f"{head:<13} {text}", 110, subsequent_indent=" " * 14, break_long_words=False))
    return 0


def _audit(path: Path) -> int:
    from ...testing.audit import audit

    plan = load(path)
    plan.get_proof()
    result = audit(plan.program, plan.model)
    show("\n".join(result.lines()))
    return 0 if result.passed else PLAN_WRONG


def _verify_recorded(folder: Path) -> int:
    from ..proof.recorded import compare
    from ..proof.recorded.files import RecordError

    try:
        comparison = compare(folder)
    except RecordError as error:
        raise UsageError(str(error)) from error
    show(comparison.lines())
    return 0 if comparison.equal else PLAN_WRONG


def _recheck(folder: Path) -> int:
    from .recheck import recheck

    show(recheck(folder))
    return 0


def _headline(plan: Plan) -> str:
    from ..reports.summary import headline

    return headline(plan.program)


MODES = {
    "audit": "break the step in hundreds of ways and count how many the proof catches",
    "recheck": "PLAN is a compiled output folder: re-check every claim of its certificate",
    "recorded": (
        "PLAN is a run folder recorded with SCALEC_RECORD=1: check its communication against"
        " the plan"
    ),
}
"""Other modes of `verify`, as options."""


def _arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "plans", type=plan_path, nargs="+", metavar="PLAN", help=f"{PLAN}; two plans are compared"
    )
    for name, help in MODES.items():
        parser.add_argument(f"--{name}", action="store_true", help=help)


COMMAND = Command(
    verify,
    _arguments,
    "Evaluates the compiled step for all ranks, at small sizes and in a prime field, and"
    " checks the loss, every\n"
    "gradient and every updated parameter against the single-device step.  Prints `equal` or"
    " the first value\n"
    "that differs.  With two plans, checks that both make the same update.",
    "scalec verify plans/llama3_405b.scale",
)
