"""The commands `compile` and `check`, and plans as all commands load them."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .command import Command, output_arguments, plan_argument, try_argument
from .op_trials import NO_FUNCTIONS, Trials, TriedFunctions, trials
from .output import PLAN_WRONG, TEXT, UsageError, format_argument, show, tell

if TYPE_CHECKING:
    from ..analysis.certificate import Proof, Tried
    from ..ir import Program
    from ..syntax.diagnostics import Diagnostic
    from ..syntax.source import Source


DTENSOR = "dtensor"
"""The target of programs of torch alone; programs of the other target use scalec's runtime."""


class Plan(NamedTuple):
    """A plan's text, its program before any placement, and its program after the last pass.

    The programs of IR text are unchanged: the text shows one already.
    """

    source: "Source"
    model: "Program"
    program: "Program"

    def get_proof(self, *, cached: bool = False) -> "Proof":
        """The proof of its step; if `cached`, the one that an earlier command kept.

        Raises PlanError.
        """
        if not cached:
            return self._evaluate_proof()
        from .kept_proofs import find, keep, proof_key

        key = proof_key(self.program, self.model)
        return find(key) or keep(key, self._evaluate_proof())

    def _evaluate_proof(self) -> "Proof":
        from ..proof import verify

        return verify(self.program, self.model)


def compile_(options: Namespace) -> None:
    """`scalec compile`."""
    from ..reports.summary import get_launch

    if options.target == DTENSOR:
        _torch_alone(options)
        return
    with trials(options.plan, options.try_functions) as trial:
        source, model = load_model(options.plan)
        script = write_program(source, model, options, trial)
    if options.format != TEXT:
        return
    how = get_launch(model)
    start = "to train"
    if how.nodes != 1:
        start = (
            f"to train, run this on each of the {how.nodes:,} nodes ($HEAD is the address of one"
            " of them)"
        )
    print(f"{start}:\n\n  {how.command(script)}")


def _torch_alone(options: Namespace) -> None:
    """`scalec compile --target dtensor`."""
    from ..emit.dtensor import emit, for_torch
    from ..emit.dtensor.refusals import without_effect
    from ..emit.write_files import OutputError, write
    from ..reports.summary import get_launch, headline

    with trials(options.plan, options.try_functions) as trial:
        plan = load(options.plan, changed=for_torch)
        folder = options.output or Path("out", f"{options.plan.stem}_{DTENSOR}")
        proof = plan.get_proof(cached=options.cache) if options.verify else None
        functions = trial.try_functions(plan.model, plan.source)
    files = emit(plan.program, plan.source, plan.model, proof, tried=functions.tried)
    try:
        write(folder, files)
    except OutputError as error:
        raise UsageError(str(error)) from error
    tell((*warnings(plan), *without_effect(plan.program)), options.format)
    if options.format == TEXT:
        command = get_launch(plan.program).command(folder / "train.py")
        start = f"to train on the bytes of a file:\n\n  {command} FILE"
        wrote = _wrote([folder / name for name in files])
        print(f"{headline(plan.program)}\n\n{_proof_text(proof, functions)}\n{wrote}\n{start}")


def check(options: Namespace) -> int:
    """`scalec check`; returns the exit status."""
    from ..reports.summary import elastic, headline, tokens

    with trials(options.plan, options.try_functions) as trial:
        plan = load(options.plan)
        if any(op.kind == "call" for op in plan.program.ops):
            # only a plan with ops of its own waits for these imports
            from ..emit.user_ops import modules

            modules(plan.program)
        functions = trial.try_functions(plan.model, plan.source)
    fits, unsure = _fits(plan.program) if options.must_fit else (True, ())
    tell((*warnings(plan), *unsure), options.format)
    if not fits:
        return PLAN_WRONG
    if options.format != TEXT:
        return 0
    size = f"ok{_but_for(functions)}  {headline(plan.program)}, {tokens(plan.program)}"
    show("\n".join(filter(None, (size, elastic(plan.program), functions.words()))))
    return 0


ModelChange = Callable[["Program"], "Program"]


def _identity(model: "Program") -> "Program":
    return model


def load(path: Path, stage: str | None = None, changed: ModelChange = _identity) -> Plan:
    """The plan of a file, as `compiled` has it."""
    return compile_source(load_source(path), stage, changed)


def load_model(path: Path) -> "tuple[Source, Program]":
    """The text of a file and its program before any placement.  Raises PlanError."""
    source = load_source(path)
    return source, model_of(source)


def load_source(path: Path) -> "Source":
    """The text of a file; IR text may be longer than a plan."""
    from ..syntax.limits import MAX_WRITTEN_BYTES, load
    from ..syntax.source import is_ir

    source = load(path, most=MAX_WRITTEN_BYTES)
    return source if is_ir(source.text) else load(path)


def model_of(source: "Source") -> "Program":
    """The program of a plan before any placement; of IR text, unchanged.  Raises PlanError."""
    from ..syntax.source import is_ir
    from ..tuning.lowering import resolve_plan

    if is_ir(source.text):
        return load_ir_program(source)
    return resolve_plan(source)


def compile_source(
    source: "Source", stage: str | None = None, changed: ModelChange = _identity
) -> Plan:
    """A plan or IR text, `changed` first, and its program after the pass `stage`, by default the
    last.

    Raises PlanError.
    """
    return make_plan(source, changed(model_of(source)), stage)


def make_plan(source: "Source", model: "Program", stage: str | None = None) -> Plan:
    """A plan with its program after the pass `stage`, by default the last.  Raises PlanError."""
    from ..tuning.lowering import PASS_NAMES, lower

    return Plan(source, model, lower(model, stage or PASS_NAMES[-1], _dump()))


def ir_text(options: Namespace) -> "Source | None":
    """The first file of IR text among a command's arguments: by itself, or in the account of an
    output folder.
    """
    from ..syntax.limits import MAX_WRITTEN_BYTES, load
    from ..syntax.source import is_ir

    arguments = vars(options)
    paths: list[Path] = [*arguments.get("plans", ())]
    if arguments.get("plan"):
        paths.append(arguments["plan"])
    for path in paths:
        file = path / "plan.json" if path.is_dir() else path
        if file.is_file():
            source = load(file, most=MAX_WRITTEN_BYTES)
            if source.path.endswith(".json") or is_ir(source.text):
                return source
    return None


def _dump() -> "Callable[[Program], None]":
    """A hook that prints programs between passes on standard error, as SCALEC_DUMP=<pass>|all
    asks.
    """
    from ..ir.printer import print_ir
    from ..tuning.lowering import PASS_NAMES

    stage = os.environ.get("SCALEC_DUMP", "")
    if stage not in ("", "all", *PASS_NAMES):
        sys.stderr.write(f"SCALEC_DUMP: unknown pass `{stage}`; use all, {', '.join(PASS_NAMES)}\n")

    def show(program: "Program") -> None:
        if stage in ("all", program.after):
            sys.stderr.write(f"# after {program.after}\n{print_ir(program)}\n")

    return show


def load_ir_program(source: "Source") -> "Program":
    """The program that IR text shows.

    Raises PlanError where the program is illegal: somebody may have edited the text by hand, so
    that is no bug of scalec.
    """
    from ..analysis.verifier import check
    from ..ir.parser import read_ir
    from ..syntax.diagnostics import Note, wrong
    from ..tuning.lowering import PASS_NAMES

    program = read_ir(source)
    try:
        assert program.after in PASS_NAMES, f"there is no pass `{program.after}`"
        check(program)
    except AssertionError as error:
        note = Note(None, str(error))
        raise wrong("E0190", "this IR is not legal", source.whole(), notes=(note,)) from None
    return program


def warnings(plan: Plan) -> "tuple[Diagnostic, ...]":
    """That a plan does not fit its GPUs, and settings that its author hardly means."""
    from ..reports.lints import advice
    from ..tuning.remedies import too_large

    diagnostics = [*advice(plan.program), too_large(plan.program, plan.model, plan.source)]
    return tuple(filter(None, diagnostics))


def _fits(program: "Program") -> "tuple[bool, tuple[Diagnostic, ...]]":
    """Whether a plan is known to fit its GPUs; the warning that these are not known."""
    from ..analysis.memory import unknown
    from ..tuning.lowering import make_variant

    answer = make_variant(program).fits
    if answer is None:
        return False, (unknown(program),)
    return answer, ()


def write_lowered_plan(plan: Plan, options: Namespace, trial: Trials) -> Path:
    """Proves, tries functions and writes the files, says so with a summary, and returns the
    path of the program.
    """
    tell(warnings(plan))
    proof, functions = _prove_and_try(plan, options, trial)
    files = _files(plan, proof, functions)
    return _write(options, files, summary_of(plan), _proof_text(proof, functions))


def write_program(source: "Source", model: "Program", options: Namespace, trial: Trials) -> Path:
    """Like `written`, for a plan that is not lowered yet: uses the kept compile of the same plan,
    if there is one.
    """
    from .kept_compiles import Compile, compile_key, find, keep

    # SCALEC_DUMP prints programs between the passes, so that they must run
    is_read = options.cache and not os.environ.get("SCALEC_DUMP")
    key = compile_key(source, model, options.verify) if is_read else ""
    cached = find(key) if key else None
    if cached:
        tell(cached.warnings, options.format)
        return _write(
            options, cached.files, cached.summary, _proof_text(cached.proof, NO_FUNCTIONS)
        )
    plan = make_plan(source, model)
    warned = warnings(plan)
    if options.format == TEXT:
        tell(warned)
    proof, functions = _prove_and_try(plan, options, trial)
    files = _files(plan, proof, functions)
    summary = summary_of(plan)
    if key:
        keep(key, Compile(warned, summary, files, proof))
    script = _write(options, files, summary, _proof_text(proof, functions))
    if options.format != TEXT:
        tell(warned, options.format)
    return script


def summary_of(plan: Plan) -> str:
    """The lines about a plan that precede its certificate's."""
    from ..reports.summary import (
        communication,
        elastic,
        headline,
        kernels,
        largest_bucket,
        needs_by_load,
        recomputation,
    )

    parts = [
        part(plan.program)
        for part in (headline, elastic, communication, needs_by_load, kernels, recomputation)
    ]
    parts.append(largest_bucket(plan.program, plan.model))
    return "\n\n".join(filter(None, parts))


def _proof_text(proof: "Proof | None", functions: TriedFunctions) -> str:
    """The line about the proof, and lines about the plan's own functions."""
    verdict = "not verified: --no-verify"
    if proof:
        verdict = f"verified{_but_for(functions)}: {proof.summary()}"
    return "\n".join(filter(None, (verdict, functions.words())))


def _but_for(functions: TriedFunctions) -> str:
    from ..analysis.certificate import but_for

    return but_for(sorted(functions.untried))


def _wrote(paths: Sequence[Path]) -> str:
    *first, last = map(str, paths)
    return f"wrote {', '.join(first)} and {last}"


def _prove_and_try(
    plan: Plan, options: Namespace, trial: Trials
) -> "tuple[Proof | None, TriedFunctions]":
    """The proof, unless it is to be skipped, and the functions that were tried."""
    proof = plan.get_proof(cached=options.cache) if options.verify else None
    return proof, trial.try_functions(plan.model, plan.source)


def _files(plan: Plan, proof: "Proof | None", functions: TriedFunctions) -> dict[str, str]:
    """The files of a plan, by name.  Raises PlanError."""
    from ..emit import emit
    from ..emit.user_ops import copies

    modules = copies(plan.program, plan.source)
    return emit(plan.program, plan.source, plan.model, proof, modules, functions.tried)


def _write(options: Namespace, files: dict[str, str], summary: str, verified: str) -> Path:
    """Writes the files, says so unless the output is for machines, and returns the path of the
    program.
    """
    from ..emit.write_files import OutputError, write

    folder = options.output or Path("out", options.plan.stem)
    try:
        write(folder, files)
    except OutputError as error:
        raise UsageError(str(error)) from error
    if options.format == TEXT:
        show(f"{summary}\n\n{verified}\n{_wrote([folder / name for name in files])}")
    return folder / "train.py"


def write(plan: Plan, proof: "Proof | None", folder: Path, tried: "Sequence[Tried]" = ()) -> None:
    """Writes the files of a plan into `folder`.  Raises PlanError and OutputError."""
    from ..emit.write_files import write

    write(folder, _files(plan, proof, TriedFunctions(tried, {})))


def _compile_arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    output_arguments(parser)
    help = (
        "dtensor: a program of torch alone, by default in out/NAME_dtensor; otherwise one that"
        " uses scalec's runtime"
    )
    parser.add_argument("--target", choices=("runtime", DTENSOR), default="runtime", help=help)
    format_argument(parser)


COMPILE = Command(
    compile_,
    _compile_arguments,
    "Compiles a plan to DIR/train.py, a readable PyTorch program, and DIR/plan.json, its"
    " collectives and memory;\n"
    "the program reads DIR/schedule.csv and DIR/message_groups.csv if it has a pipeline,"
    " DIR/tiles.json if it has\n"
    "Triton kernels, DIR/hf_names.json, names in files of weights, and DIR/predictions.json,"
    " memory and\n"
    "time of a step.\n"
    "Prints what a step communicates and the command that starts training.  Never overwrites"
    " files that\n"
    "scalec did not write.\n"
    "With --target dtensor DIR/train.py imports nothing but torch and DIR/torch_ops.py, which"
    " imports torch alone;\n"
    "it reads DIR/schedule.csv if it has a pipeline, and trains on the bytes of a file, or in a"
    " loop of your own on\n"
    "any data; it saves and watches nothing by itself.",
    "scalec compile plans/tiny_llama.scale -o out/tiny_llama",
)


def _check_arguments(parser: ArgumentParser) -> None:
    plan_argument(parser)
    help = "exit with status 1 unless the plan fits the GPU named in its cluster"
    parser.add_argument("--must-fit", action="store_true", help=help)
    try_argument(parser)
    format_argument(parser)


CHECK = Command(
    check,
    _check_arguments,
    "Compiles a plan without writing anything.  Prints `ok`, the model's size and the tokens"
    " per step, or the\n"
    "plan's errors.  If the plan does not fit its GPU, warns and lists changes that would make"
    " it fit.",
    "scalec check plans/llama3_405b.scale",
)
