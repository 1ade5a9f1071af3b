"""`scalec verify --recheck`: re-checks the certificate of an output folder."""

import json
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from attrs import evolve

from .command import need
from .compile import DTENSOR, Plan, load_ir_program
from .op_trials import trials
from .output import UsageError

if TYPE_CHECKING:
    from ..analysis.certificate import Tried
    from ..ir import Program
    from ..syntax.source import Source, Span


def recheck(folder: Path) -> str:
    """The result, in lines.

    Raises PlanError where a file differs from the plan's, UsageError if it is no output folder.
    """
    from ..analysis.certificate import NOT_EVALUATED
    from ..emit.user_ops import get_copied_sources
    from ..reports.summary import headline
    from ..syntax.limits import MAX_WRITTEN_BYTES, load

    account = _account(folder / "plan.json")
    script = load(folder / "train.py", most=MAX_WRITTEN_BYTES)
    plan = _plan(folder, account)
    proof = plan.get_proof()
    emit, check = _target(account)
    modules = get_copied_sources(plan.program, folder)
    _compare_modules(modules, account)
    is_unverified = _values(account) == NOT_EVALUATED
    certified = None
    if not is_unverified:
        certified = evolve(proof, kept=_was_kept(account))
    files = emit(
        plan.program,
        plan.source,
        plan.model,
        certified,
        {name: module.text for name, module in modules.items()},
        _try_functions_again(plan, folder, account),
    )
    names = sorted({*files} - {"train.py", "plan.json", *modules})
    # first the files that the program reads: of these it only has hashes
    for name in names:
        _compare_text(load(folder / name, most=MAX_WRITTEN_BYTES), files[name])
    matched = _count_matched_ops(script, plan, check)
    _compare(folder / "plan.json", account, json.loads(files["plan.json"]))
    _compare_text(script, files["train.py"])
    lines = [
        f"equal  {folder}: {headline(plan.program)}",
        "",
        proof.lines(),
        f"train.py  {matched} ops, each matched to the IR, and every line as written",
    ]
    lines += [f"{name}  as written" for name in names]
    lines += [f"{name}  as copied" for name in modules]
    if is_unverified:
        words = "it was compiled with --no-verify, and says so; the step was evaluated now"
        lines += ["", words]
    return "\n".join(lines)


def load_compiled_plan(folder: Path) -> Plan:
    """The plan of an output folder, as its plan.json has it.

    Raises UsageError if it is no output folder, PlanError if its plan does not compile.
    """
    return _plan(folder, _account(folder / "plan.json"))


def _plan(folder: Path, account: dict[str, Any]) -> Plan:
    from ..syntax.source import Source
    from ..tuning.lowering import lower

    model = load_ir_program(Source(str(folder / "plan.json"), "\n".join(account["model"]) + "\n"))
    return Plan(Source(account["plan"], ""), model, lower(model))


def _account(path: Path) -> dict[str, Any]:
    """The content of a plan.json."""
    from ..syntax.limits import MAX_WRITTEN_BYTES, load

    try:
        content: Any = json.loads(load(path, most=MAX_WRITTEN_BYTES).text)
    except ValueError:
        content = None
    if not (isinstance(content, dict) and _has_model(cast("dict[str, Any]", content))):
        raise UsageError(f"`{path}` was not written by this scalec: compile the plan again")
    return cast("dict[str, Any]", content)


def _has_model(account: dict[str, Any]) -> bool:
    lines = account.get("model")
    if not isinstance(lines, list) or not isinstance(account.get("plan"), str):
        return False
    return all(isinstance(line, str) for line in cast("list[Any]", lines))


def _values(account: dict[str, Any]) -> object:
    """The certificate's statements about the step's values."""
    certificate: Any = account.get("certificate")
    if not isinstance(certificate, dict):
        return None
    return cast("dict[str, Any]", certificate).get("values")


def _was_kept(account: dict[str, Any]) -> bool:
    """Whether the proof was read from the user's cache when the plan was compiled."""
    values = _values(account)
    return isinstance(values, dict) and "evaluated" in values


def _try_functions_again(plan: Plan, folder: Path, account: dict[str, Any]) -> "tuple[Tried, ...]":
    """The functions that the certificate says were tried, tried once more."""
    certificate: Any = account.get("certificate")
    if not isinstance(certificate, dict) or "tried" not in certificate:
        return ()
    need("torch", "trying the plan's functions")
    with trials(folder / "train.py", wanted=True) as trial:
        return trial.try_functions(plan.model, plan.source, folder).tried


Check = Callable[[str, "Program"], int]


def _target(account: dict[str, Any]) -> tuple[Callable[..., dict[str, str]], Check]:
    """The functions that write a program's files, and read its text back."""
    if account.get("target") == DTENSOR:
        from ..emit import dtensor
        from ..emit.dtensor import readback

        return dtensor.emit, readback.check
    from ..emit import emit
    from ..emit.readback import check

    return emit, check


def _count_matched_ops(script: "Source", plan: Plan, check: Check) -> int:
    """The number of ops that train.py was matched to."""
    try:
        return check(script.text, plan.program)
    except AssertionError as error:
        _refuse("train.py is not the plan's", script.whole(), str(error))


def _compare(path: Path, account: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares a plan.json with the one that this scalec would write, but for the version."""
    from ..syntax.source import Source

    changed = list[str]()
    for key in expected | account:
        if key != "written_by" and expected.get(key) != account.get(key):
            changed.append(key)
    if not changed:
        return
    help = ""
    if account.get("written_by") != expected["written_by"]:
        help = f"{account.get('written_by')} wrote it: compile the plan again"
    _refuse(
        "plan.json is not the plan's",
        Source(str(path), "").whole(),
        f"it differs under {', '.join(changed)}",
        help,
    )


def _compare_modules(modules: "Mapping[str, Source]", account: dict[str, Any]) -> None:
    """Compares the modules with the hashes of their copies, before any of them is run."""
    from ..emit.plan_json import digest

    hashes: Any = account.get("modules")
    digests = cast("dict[str, Any]", hashes) if isinstance(hashes, dict) else {}
    for name, module in modules.items():
        if digests.get(name) != digest(module.text):
            why = "it is not the copy that was made when the plan was compiled"
            _refuse(
                f"{name} is not the plan's",
                module.whole(),
                why,
                "change the file beside the plan and compile again",
            )


def _compare_text(script: "Source", expected: str) -> None:
    """Compares comments and layout too; code was matched before."""
    if script.text == expected:
        return
    lines, number = expected.split("\n"), 0
    for line, expected_line in zip_longest(script.text.split("\n"), lines, fillvalue=""):
        if line != expected_line:
            break
        number += 1
    why = "the plan's has ended"
    if number < len(lines):
        line = lines[number]
        if len(line) > 120:
            line = f"{line[:119]}…"
        why = f"the plan's is `{line}`"
    _refuse(
        f"{Path(script.path).name} is not the plan's",
        _line(script, number),
        why,
        "compile the plan again",
    )


def _line(source: "Source", number: int) -> "Span":
    """One line, counted from 0; the end of a text that is shorter."""
    lines = source.text.split("\n")[: number + 1]
    end = sum(map(len, lines)) + len(lines) - 1
    return source.span(end - len(lines[-1]), end)


def _refuse(message: str, place: "Span", why: str, help: str = "") -> NoReturn:
    from ..syntax.diagnostics import Note, wrong

    raise wrong("E0703", message, place, notes=(Note(None, why),), help=help) from None
