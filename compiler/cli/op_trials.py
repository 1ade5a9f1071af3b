"""Trials of the functions of a plan's own ops, in a process of their own, before scalec trusts the
plan.

Purpose: starts `scalec.testing.op_trial`, ends it where a function hangs, and reports its outcomes
at the plan's lines.  Non-goals: the checks.  This process imports neither torch nor the user's
modules.
"""

import json
import os
import re
import select
import signal
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analysis.certificate import Tried
    from ..analysis.op_trials import TrialSignature
    from ..ir import Op, Program
    from ..syntax.diagnostics import PlanError
    from ..syntax.source import Source, Span
    from ..syntax.tree import Name, UserOp

PROGRAM = "scalec.testing.op_trial"
"""The module that tries functions: the compiler itself does not import torch."""

IMPORT_SECONDS = 180
"""How long torch may take to be imported."""

SECONDS = 20
"""How long the trial of one function may take."""

Outcome = dict[str, str]
"""The result of a function's trial, as `scalec.testing.op_trial` says it: empty if the function
passed.
"""


class TrialProcess:
    """A process that tries functions; it imports torch while the plan is being compiled."""

    def __init__(self) -> None:
        import subprocess  # most plans have no functions of their own

        # no GPU: a trial is on the CPU, and another run may need all of a GPU's memory
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # so that what a function starts ends with it
        )
        self._unread = b""

    def send(self, folder: Path, signatures: "Sequence[TrialSignature]") -> None:
        """Says which functions to try."""
        from attrs import asdict

        request = {
            "folder": str(folder.resolve()),
            "signatures": [asdict(signature) for signature in signatures],
        }
        with suppress(BrokenPipeError):  # it has ended: there will be no answer
            stream = self._stream(self._process.stdin)
            stream.write(json.dumps(request).encode())
            stream.close()

    def get_answer(self, seconds: float) -> dict[str, Any] | None:
        """The next answer; None if none comes in time, or the process has ended."""
        stream, deadline = self._stream(self._process.stdout), monotonic() + seconds
        while b"\n" not in self._unread:
            seconds_left = max(deadline - monotonic(), 0)
            ready, _, _ = select.select([stream], [], [], seconds_left)
            part = os.read(stream.fileno(), 1 << 16) if ready else b""
            if not part:
                return None
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _stream(self, stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None, "op trials: the process has no pipes"
        return stream

    @property
    def has_ended(self) -> bool:
        """Whether it has ended by itself."""
        from subprocess import TimeoutExpired

        with suppress(TimeoutExpired):
            self._process.wait(timeout=1)
        return self._process.poll() is not None

    def end(self) -> None:
        """Ends it, and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # it ended before it had read all
                self._stream(stream).close()


class Trials:
    """Tries the functions of a plan; where it tries none, `reason` says why."""

    def __init__(self, reason: str, process: TrialProcess | None, seconds: float = SECONDS) -> None:
        self.reason, self._process, self._seconds = reason, process, seconds

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process:
            self._process.end()
        self._process = None

    def try_functions(
        self, model: "Program", source: "Source", folder: Path | None = None
    ) -> "TriedFunctions":
        """Tries the functions that a plan calls, of modules beside its text or in `folder`.  Raises
        PlanError.

        `model` is the plan before any placement.
        """
        from ..analysis.op_trials import get_tried_functions, trial_signatures
        from ..syntax.diagnostics import PlanError

        calls = trial_signatures(model)
        if self.reason or not calls:
            functions = [signature.function for signature in calls]
            return TriedFunctions((), dict.fromkeys(functions, self.reason))
        declarations = _Declarations(source)
        signatures = [declarations.get_signature_with_names(signature) for signature in calls]
        outcomes = self._outcomes(folder or Path(source.path).parent, signatures)
        # by function: other calls of it would only say the same of other dims
        mistakes, untried = dict[str, PlanError](), dict[str, str]()
        for (signature, op), outcome in zip(calls.items(), outcomes, strict=True):
            function = signature.function
            if "seen" in outcome:
                mistakes.setdefault(function, declarations.mistake(signature, op, outcome))
            if "cannot" in outcome:
                untried[function] = outcome["cannot"]
        _raise_all(mistakes.values())
        tried = [signature for signature in calls if signature.function not in untried]
        return TriedFunctions(get_tried_functions(tried), untried)

    def _outcomes(self, folder: Path, signatures: "Sequence[TrialSignature]") -> list[Outcome]:
        """The outcome of each function.

        Where a function ends its process or hangs, another process tries the functions after it.
        """
        outcomes = list[Outcome]()
        while len(outcomes) < len(signatures):
            process = self._process or TrialProcess()
            self._process = process
            process.send(folder, signatures[len(outcomes) :])
            if process.get_answer(IMPORT_SECONDS) is None:
                missing = len(signatures) - len(outcomes)
                outcomes += [{"cannot": "torch cannot be imported"}] * missing
                break
            outcomes += self._get_outcomes_of_process(process, len(signatures) - len(outcomes))
            self.end()
        return outcomes

    def _get_outcomes_of_process(self, process: TrialProcess, count: int) -> list[Outcome]:
        """The outcomes of one process: of all functions, or up to the function that it did not
        survive.
        """
        outcomes = list[Outcome]()
        while len(outcomes) < count:
            answer = process.get_answer(self._seconds)
            if answer is None:
                outcomes.append(_outcome_without_answer(process.has_ended, self._seconds))
                break
            if "ended" in answer:
                del answer["ended"]
                outcomes.append({key: str(value) for key, value in answer.items()})
        return outcomes


def _outcome_without_answer(has_ended: bool, seconds: float) -> Outcome:
    if has_ended:
        return {
            "kind": "exit",
            "seen": "ends its process",
            "help": "raise an error instead",
            "dim": "",
        }
    help = (
        "it is tried on tensors of a few numbers; with `--no-try` it is not tried, and named"
        " as not verified"
    )
    return {"kind": "hang", "seen": f"has not ended after {seconds:g} s", "help": help, "dim": ""}


class TriedFunctions:
    """The functions of a plan.

    tried    functions that were tried, for the certificate
    untried  by function that was not tried, the reason
    """

    def __init__(self, tried: "Sequence[Tried]", untried: dict[str, str]) -> None:
        self.tried, self.untried = tuple(tried), untried

    def words(self) -> str:
        """Lines that name all; "" for a plan that has none."""
        lines = list[str]()
        if self.tried:
            names = ", ".join(trial.function for trial in self.tried)
            lines.append(f"tried: {names}, on random numbers")
        for function, reason in sorted(self.untried.items()):
            lines.append(f"not tried: {function}, since {reason}")
        return "\n".join(lines)


NO_FUNCTIONS = TriedFunctions((), {})
"""The result for a plan without functions of its own."""


@contextmanager
def trials(path: Path, wanted: bool) -> Generator[Trials]:
    """The trials of the plan in a file; the process is started at once if its text has an op of
    its own.
    """
    if not wanted:
        yield Trials("--no-try was given", None)
        return
    if find_spec("torch") is None:
        yield Trials("torch is not installed", None)
        return
    process = TrialProcess() if _has_own_ops(path) else None
    running = Trials("", process)
    try:
        yield running
    finally:
        running.end()


def _has_own_ops(path: Path) -> bool:
    """Whether a plan seems to have an op of its own: a guess, for a start before the plan has
    been read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return re.search(r'\bfrom\s+"\w+:\w+"', text) is not None


# ---- the plan's words


class _Declarations:
    """The plan's `op`s, for their names and places in the text; IR text has none."""

    def __init__(self, source: "Source") -> None:
        from ..frontend.load_plan import gather
        from ..syntax.diagnostics import Diagnostics
        from ..syntax.source import is_ir

        has_ops = bool(source.text) and not is_ir(source.text)
        self._declared = gather(source, Diagnostics()).ops if has_ops else ()

    def get_signature_with_names(self, signature: "TrialSignature") -> "TrialSignature":
        """The signature with the operands' names in the plan."""
        from attrs import evolve

        declared = self._find_declaration(signature)
        if declared is None:
            return signature
        names = tuple(operand.name.name for operand in declared.operands if operand.dims)
        return evolve(signature, names=names)

    def _find_declaration(self, signature: "TrialSignature") -> "UserOp | None":
        """The `op` that a call belongs to.

        Two may have one function, and differ in the dims in `over`.
        """
        for declared in self._declared:
            if declared.function.value == signature.function and _fits(declared, signature):
                return declared
        return None

    def mistake(self, signature: "TrialSignature", op: "Op", outcome: Outcome) -> "PlanError":
        """The error for a function that differs from the plan, at the plan's word about it."""
        from ..syntax.diagnostics import wrong

        module, _, name = signature.function.partition(":")
        message = f"`{name}` of `{module}.py` {outcome['seen']}"
        span, label = self._place(signature, op, outcome)
        return wrong("E0222", message, span, label, outcome["help"])

    def _place(self, signature: "TrialSignature", op: "Op", outcome: Outcome) -> "tuple[Span, str]":
        declared, wrong_name = self._find_declaration(signature), outcome["dim"]
        if declared is None:
            return op.span, "called here"
        if outcome["kind"] == "along":
            return _along(declared, signature, wrong_name).span, f"`{wrong_name}` of the call"
        if outcome["kind"] == "causal" and declared.causal:
            return declared.causal.span, f"`{wrong_name}` of the call"
        for operand in declared.operands:
            if wrong_name and operand.name.name == wrong_name:
                return operand.span, "not so"
        return declared.function.span, "this function"


def _fits(declared: "UserOp", signature: "TrialSignature") -> bool:
    """Whether a call can belong to an `op`, by its tensors, its results and its linear operands."""
    from ..ops.user import LEAD

    tensors = [operand for operand in declared.operands if operand.dims]
    linear = tuple(number for number, operand in enumerate(tensors) if operand.is_linear)
    counts = len(tensors) == len(signature.operands) and len(declared.gives) == len(signature.gives)
    if not counts or linear != signature.linear:
        return False
    along = 0
    for name in declared.along:
        along += _leading(declared, signature) if name.name == LEAD else 1
    return len(signature.along) == along


def _leading(declared: "UserOp", signature: "TrialSignature") -> int:
    """How many dims `..` means in a call."""
    from ..ops.user import LEAD

    tensors = [operand.dims for operand in declared.operands if operand.dims]
    for dims, call_dims in zip(tensors, signature.operands, strict=True):
        if any(name.name == LEAD for name in dims):
            return len(call_dims) - len(dims) + 1
    return 0


def _along(declared: "UserOp", signature: "TrialSignature", dim: str) -> "Name":
    """The word of `over` that a dim of the call stands for."""
    from ..ops.user import LEAD

    tensors = [operand.dims for operand in declared.operands if operand.dims]
    for dims, call_dims in zip(tensors, signature.operands, strict=True):
        # `..` stands for the first dims of the call, so that names match from the end
        names = [name for name in dims if name.name != LEAD]
        matching = dict(zip(reversed(call_dims), reversed(names), strict=False))
        if dim in matching:
            return next(name for name in declared.along if name.name == matching[dim].name)
    return next(name for name in declared.along if name.name == LEAD)


def _raise_all(mistakes: "Iterable[PlanError]") -> None:
    """Raises one error with all mistakes, each once."""
    from ..syntax.diagnostics import Diagnostics

    diagnostics = Diagnostics()
    for mistake in mistakes:
        diagnostics.add(mistake)
    diagnostics.check()
