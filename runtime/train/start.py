"""The start of a run: its data, and what it begins with, alike on all ranks; or the export of
what was saved.
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
from ..data.corpus import held_out, opened, repeated, too_few
from ..data.mixture import Mixture
from ..data.vocabulary import check_ids
from ..errors import RunError
from .alike import alike
from .identity import content, differences, identity, optimizer, other_rate, rate
from .ignored_options import Situation, ignored_by_export, ignored_options
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
    """The start of a run: its data, weights or a checkpoint if it continues from one, and its
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
    """On the run's folder, of the first rank."""
    lock: Lock | None = None

    def check_claim(self) -> None:
        """RunError where a later start has the folder."""
        if self.claim is not None:
            self.claim.check(now=True)


def start(plan: Plan, options: Options) -> Start:
    """The start of the run, equal on all ranks; moves an earlier run's files away.

    RunError on all.  Collective.
    """
    lock, claim = take(options.out, plan)
    resume, damaged = newest_whole(checkpoints(options)) if options.resume else (None, [])
    looks = environment("LOCAL_RANK", 0) == 0
    corpus = replace(plan.data, as_is=plan.data.as_is or options.data_as_is)
    data = together(lambda: opened(corpus, options.data, plan.seq, looks))
    mixtures = [mixture for mixture in data if mixture is not None]
    together(lambda: check_ids(mixtures, plan.vocab, *c10d.place()))
    hashes = content(data[0])
    start = together(lambda: _prepare(plan, options, resume, data, hashes))
    checkpoint = f"{start.resume} of index {start.resume.digest}" if start.resume else "none"
    alike(
        {"checkpoint": checkpoint, **{name: f"{value}" for name, value in start.run.items()}},
        _FILES,
    )
    moved = together(lambda: _cleared(options.out, start) if is_first() else [])
    together(lambda: require_writable(options, checkpoints(options)))
    warnings = [lock.warning] if lock and lock.warning else []
    return replace(start, notes=(*warnings, *damaged, *moved, *start.notes), lock=lock, claim=claim)


def _prepare(
    plan: Plan,
    options: Options,
    resume: Saved | None,
    data: tuple[Mixture, Mixture | None],
    hashes: list[str],
) -> Start:
    """Opens the weights, and looks at checkpoint and data.

    RunError if any is not there or not enough.
    """
    training, held = data
    if options.resume == "newest" and resume is None:
        raise RunError(
            f"nothing to resume: no checkpoint in {checkpoints(options)}; --resume auto begins"
            " where there is none"
        )
    first = saver.finished_steps(resume.path) if resume else 0
    if first >= options.steps and options.resume == "newest":
        raise RunError(
            f"{resume} has finished its {first} steps already: ask for more with --steps"
            f" {2 * first}"
        )
    if (asked := profiling()) and asked.first > options.steps - first > 0:
        raise RunError(
            f"SCALEC_PROFILE asks for step {asked.first} of this run, which has"
            f" {options.steps - first}"
        )
    run = identity(plan, options.seed, training, hashes)
    run = {**run, **optimizer(Path(sys.argv[0])), **rate(plan, options.lr, options.steps)}
    lr = plan.schedule.lr(first, options.steps, options.lr)
    notes = _changes(resume, run, lr, options.resume_anyway) if resume else []
    reader = (
        Reader(options.init, plan.names) if options.init and plan.names and not resume else None
    )
    if few := too_few(training, plan.global_batch):
        raise RunError(f"too little data: {few}, so that a step would see some twice")
    if held and (few := too_few(held, plan.global_batch)):
        notes.append(f"validation sees some sequences twice: {few}")
    resumed_from = str(resume) if resume else ""
    notes += ignored_options(Situation(options, plan, held is not None, resumed_from))
    notes += held_out(held)
    notes += repeated(training, options.steps, plan.global_batch)
    return Start(run, training, held, reader, resume, first, (*notes,))


def _changes(resume: Saved, run: Identity, lr: float, anyway: bool) -> list[str]:
    """How the run differs from the one that it goes on with.  RunError unless it may, or is to go
    on `anyway`.

    `lr` is the learning rate of its first step.
    """
    then, step = resume.run, saver.finished_steps(resume.path)
    found = differences(then, run, step)
    if found and not anyway:
        more = (
            "this run would not go on with that one; if it is to, --resume-anyway in place of"
            " --resume"
        )
        raise RunError(
            f"{resume} is of another run",
            *found,
            more,
            "without either, or by `scalec run --anew`, it begins, and moves that run aside",
        )
    return [*found, *other_rate(then, run, step, lr)]


def export_newest(plan: Plan, options: Options, folder: Path) -> None:
    """Writes the newest checkpoint that is whole as files of weights.  RunError."""
    from ..checkpoint.export import export  # most runs do without

    for line in ignored_by_export(options):
        warn(line)
    require_new_folder(folder)
    saved, damaged = newest_whole(checkpoints(options))
    for note in damaged:
        print(note)
    if saved is None:
        raise RunError(f"nothing to export: no checkpoint in {checkpoints(options)}")
    assert plan.names, "loop: check_options lets an export without names pass"
    names = replace(plan.names, dtype=options.export_dtype) if options.export_dtype else plan.names
    export(saved, folder, names)
    beside = (
        "tensors have the parameters' own names"
        if names.have_parameter_names
        else "the model's config.json and tokenizer belong beside it"
    )
    print(f"wrote {saved} to {folder}; {beside}")


def checkpoints(options: Options) -> Path:
    return options.out / "checkpoints"


def _cleared(folder: Path, start: Start) -> list[str]:
    """Has the folder hold this run's files alone, up to where it begins; what was moved, in
    words.
    """
    if start.resume is None:
        return _set_aside(folder)
    mend(folder, start.first)
    return set_aside(folder / "checkpoints", start.first)


def _set_aside(folder: Path) -> list[str]:
    """Moves what an earlier run left into a folder of its own, so that it is not taken for
    ours, and says so.
    """
    earlier = [path for name in _LEFT if (path := folder / name).exists()]
    if not earlier:
        return []
    number = next(n for n in range(1, 1 << 30) if not (folder / f"earlier-{n}").exists())
    target = folder / f"earlier-{number}"
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    return [
        f"moved an earlier run ({', '.join(path.name for path in earlier)}) from {folder} to"
        f" {target}"
    ]
