"""The start of a run: its data, and its weights or checkpoint, alike on all ranks; or the export of
a checkpoint.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoint import saver
from ..checkpoint.agreement import together
from ..checkpoint.hf_weights import Reader
from ..checkpoint.index import Identity
from ..checkpoint.reader import Saved
from ..checkpoint.saver import newest_whole, set_aside
from ..comm import c10d
from ..config.environment import profiling
from ..config.plan import Plan
from ..data.corpus import holdout_lines, open_corpus, repetition_lines, shortage_problem
from ..data.mixture import Mixture
from ..data.vocabulary import check_ids
from ..errors import RunError
from .alike import alike
from .identity import content, differences, identity, optimizer, other_rate, rate
from .ignored_options import Situation, find_ignored_by_export, find_ignored_options
from .launch import environment, is_first, warn
from .log_file import NAME, REPEATED, mend
from .options import Options
from .outputs import require_new_folder, require_writable
from .run_folder import Claim, Lock, take

_LEFT = (NAME, REPEATED, "checkpoints", "recorded")
"""Files that a run leaves in its folder."""
_FILES = "do all nodes see the same files?"


@dataclass(frozen=True)
class Start:
    """The start of a run: its data, its weights, or the checkpoint that it continues from, and its
    first lines.
    """

    run: Identity
    training: Mixture
    validation: Mixture | None
    weights: Reader | None
    resume: Saved | None
    first: int
    notes: tuple[str, ...]
    claim: Claim | None = None
    """The first rank's claim to the run's folder."""
    lock: Lock | None = None

    def check_claim(self) -> None:
        """RunError where a later start has the folder."""
        if self.claim is not None:
            self.claim.check(now=True)


def start(plan: Plan, options: Options) -> Start:
    """Makes the start of the run, equal on all ranks; moves an earlier run's files away.

    RunError on all ranks.  Collective.
    """
    lock, claim = take(options.out, plan)
    resume, damaged = None, list[str]()
    if options.resume:
        resume, damaged = newest_whole(checkpoints(options))
    looks = environment("LOCAL_RANK", 0) == 0
    corpus = replace(plan.data, as_is=plan.data.as_is or options.data_as_is)
    data = together(lambda: open_corpus(corpus, options.data, plan.seq, looks))
    mixtures = [mixture for mixture in data if mixture is not None]
    together(lambda: check_ids(mixtures, plan.vocab, *c10d.place()))
    hashes = content(data[0])
    start = together(lambda: _prepare(plan, options, resume, data, hashes))
    alike(_settings_of(start), _FILES)
    moved = together(lambda: _clear_folder(options.out, start) if is_first() else [])
    together(lambda: require_writable(options, checkpoints(options)))
    notes = (*damaged, *moved, *start.notes)
    if lock and lock.warning:
        notes = (lock.warning, *notes)
    return replace(start, notes=notes, lock=lock, claim=claim)


def _settings_of(start: Start) -> dict[str, str]:
    """The settings of a start that must be the same on all ranks."""
    settings = {"checkpoint": "none"}
    if start.resume:
        settings["checkpoint"] = f"{start.resume} of index {start.resume.digest}"
    for name, value in start.run.items():
        settings[name] = f"{value}"
    return settings


def _prepare(
    plan: Plan,
    options: Options,
    resume: Saved | None,
    data: tuple[Mixture, Mixture | None],
    hashes: list[str],
) -> Start:
    """Opens the weights, and looks at checkpoint and data.

    RunError if one of them is missing or not enough.
    """
    training, validation = data
    if options.resume == "newest" and resume is None:
        raise RunError(
            f"nothing to resume: no checkpoint in {checkpoints(options)}; --resume auto begins"
            " where there is none"
        )
    first = saver.get_finished_steps(resume.path) if resume else 0
    if first >= options.steps and options.resume == "newest":
        raise RunError(
            f"{resume} has finished its {first} steps already: ask for more with --steps"
            f" {2 * first}"
        )
    profile, steps_left = profiling(), options.steps - first
    if profile and profile.first > steps_left > 0:
        raise RunError(
            f"SCALEC_PROFILE asks for step {profile.first} of this run, which has {steps_left}"
        )
    run = identity(plan, options.seed, training, hashes)
    run = {**run, **optimizer(Path(sys.argv[0])), **rate(plan, options.lr, options.steps)}
    lr = plan.schedule.lr(first, options.steps, options.lr)
    notes, reader, resumed_from = list[str](), None, ""
    if resume:
        notes += _changes(resume, run, lr, options.resume_anyway)
        resumed_from = str(resume)
    elif options.init and plan.names:
        reader = Reader(options.init, plan.names)
    if few := shortage_problem(training, plan.global_batch):
        raise RunError(f"too little data: {few}, so that a step would see some twice")
    if validation and (few := shortage_problem(validation, plan.global_batch)):
        notes.append(f"validation sees some sequences twice: {few}")
    notes += find_ignored_options(Situation(options, plan, validation is not None, resumed_from))
    notes += holdout_lines(validation)
    notes += repetition_lines(training, options.steps, plan.global_batch)
    return Start(run, training, validation, reader, resume, first, (*notes,))


def _changes(resume: Saved, run: Identity, lr: float, anyway: bool) -> list[str]:
    """Lines that say how the run differs from the one that it goes on with.

    RunError where they differ in more than a run may change, unless it is to go on `anyway`.  `lr`
    is the learning rate of its first step.
    """
    then, step = resume.run, saver.get_finished_steps(resume.path)
    lines = differences(then, run, step)
    if lines and not anyway:
        more = (
            "this run would not go on with that one; if it is to, --resume-anyway in place of"
            " --resume"
        )
        raise RunError(
            f"{resume} is of another run",
            *lines,
            more,
            "without either, or by `scalec run --anew`, it begins, and moves that run aside",
        )
    return [*lines, *other_rate(then, run, step, lr)]


def export_newest(plan: Plan, options: Options, folder: Path) -> None:
    """Writes the newest checkpoint that is whole as files of weights.  RunError."""
    from ..checkpoint.export import export  # most runs do without

    for line in find_ignored_by_export(options):
        warn(line)
    require_new_folder(folder)
    saved, damaged = newest_whole(checkpoints(options))
    for note in damaged:
        print(note)
    if saved is None:
        raise RunError(f"nothing to export: no checkpoint in {checkpoints(options)}")
    assert plan.names, "loop: check_options lets an export without names pass"
    names = plan.names
    if options.export_dtype:
        names = replace(names, dtype=options.export_dtype)
    export(saved, folder, names)
    advice = "the model's config.json and tokenizer belong beside it"
    if names.have_parameter_names:
        advice = "tensors have the parameters' own names"
    print(f"wrote {saved} to {folder}; {advice}")


def checkpoints(options: Options) -> Path:
    """The folder of a run's checkpoints."""
    return options.out / "checkpoints"


def _clear_folder(folder: Path, start: Start) -> list[str]:
    """Clears the folder of other runs' files, and of this run's lines and checkpoints after the
    step that it begins with; a line for each move.
    """
    if start.resume is None:
        return _set_aside(folder)
    mend(folder, start.first)
    return set_aside(folder / "checkpoints", start.first)


def _set_aside(folder: Path) -> list[str]:
    """Moves an earlier run's files into a folder of their own, so that nobody takes them for this
    run's; a line that says so.
    """
    earlier = [folder / name for name in _LEFT if (folder / name).exists()]
    if not earlier:
        return []
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    target = folder / f"earlier-{number}"
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    names = ", ".join(path.name for path in earlier)
    return [f"moved an earlier run ({names}) from {folder} to {target}"]
