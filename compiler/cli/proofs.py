"""The command `verify`: a plan, two plans, an output folder, a recorded run, or the verifier itself.

Non-goals: how anything is shown (`verify`).
"""

import json
from argparse import Namespace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from .plans import Plan, load, read
from .usage import PLAN_WRONG, UsageError

if TYPE_CHECKING:
    from ..certificate import Proof


def verify(options: Namespace) -> int:
    """`scalec verify`; returns the exit status."""
    modes = {"audit": _audit, "recheck": _recheck, "recorded": _recorded}
    chosen = [mode for mode in modes if getattr(options, mode)]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} and --{chosen[1]} are asked for; choose one")
    if len(options.plans) > (1 if chosen else 2):
        raise UsageError("verify takes one plan, or two to hold against each other")
    if chosen:
        return modes[chosen[0]](options.plans[0])
    return _plan(options.plans[0]) if len(options.plans) == 1 else _two(*options.plans)


def _plan(path: Path) -> int:
    began = perf_counter()
    plan = load(path)
    proof = _proved(plan)
    print(f"equal  {_headline(plan)}\n\n{proof.lines()}\n{'time':<9} {perf_counter() - began:.2f} s")
    return 0


def _two(first: Path, second: Path) -> int:
    from ..verify import hold_alike

    plans = load(first), load(second)
    proofs = [_proved(plan) for plan in plans]
    hold_alike(plans[0].model, plans[1].model)
    print(f"equal  {first} and {second} make the same update\n")
    for plan, proof in zip(plans, proofs, strict=True):
        print(f"  {_headline(plan)}\n    {proof.summary()}")
    return 0


def _audit(path: Path) -> int:
    from ..verify.audit import audit

    plan = load(path)
    _proved(plan)
    found = audit(plan.program, plan.model)
    print("\n".join(found.lines()))
    return 0 if found.passed else PLAN_WRONG


def _recorded(folder: Path) -> int:
    from ..verify.recorded import compare
    from ..verify.recorded.files import RecordError

    try:
        found = compare(folder)
    except RecordError as error:
        raise UsageError(str(error)) from error
    print(found.lines())
    return 0 if found.equal else PLAN_WRONG


def _recheck(folder: Path) -> int:
    """Everything that the certificate of an output folder says, shown once more from what lies there."""
    from ..diagnostics import Diagnostic, Note, PlanError
    from ..emit import emit
    from ..emit.readback import check
    from ..limits import load as load_text
    from ..passes import lower
    from ..source import Source

    account, script = folder / "plan.json", load_text(folder / "train.py")
    written = _account(account)
    source = Source(str(account), "\n".join(written["model"]) + "\n")
    model = read(source)
    plan = Plan(Source(str(written["plan"]), ""), model, lower(model))
    proof = _proved(plan)
    try:
        matched = check(script.text, plan.program)
    except AssertionError as error:
        note = Note(None, str(error))
        raise PlanError([Diagnostic("E0703", "train.py is not the plan's", script.whole(), notes=(note,))]) from None
    made = json.loads(emit(plan.program, plan.source, model, proof)["plan.json"])
    if changed := [key for key in made if key != "written_by" and made[key] != written.get(key)]:
        note = Note(None, f"it differs under {', '.join(changed)}")
        place = Source(str(account), "").whole()
        raise PlanError([Diagnostic("E0703", "plan.json is not the plan's", place, notes=(note,))])
    print(
        f"equal  {folder}: {_headline(plan)}\n\n{proof.lines()}\n{'train.py':<9} {matched} ops, each matched to the IR"
    )
    return 0


def _account(path: Path) -> dict[str, Any]:
    """The content of a plan.json."""
    from ..limits import load as load_text

    try:
        content: Any = json.loads(load_text(path).text)
    except ValueError:
        content = None
    if not isinstance(content, dict) or "model" not in content or "plan" not in content:
        raise UsageError(f"`{path}` was not written by this scalec: compile the plan again")
    return cast("dict[str, Any]", content)


def _proved(plan: Plan) -> "Proof":
    from ..verify import verify

    return verify(plan.program, plan.model)


def _headline(plan: Plan) -> str:
    from ..summary import headline

    return headline(plan.program)
