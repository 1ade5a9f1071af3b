"""The training loop: batches, steps, log lines, checkpoints."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint import saver
from ..checkpoint.agreement import agreed, together
from ..checkpoint.hf_weights import Reader
from ..checkpoint.index import Identity
from ..checkpoint.reader import Saved
from ..comm.mesh import Mesh
from ..config.environment import Profiled, profiling, recording, sanitizing, unknown
from ..config.plan import Metrics, Plan
from ..data.loader import Batch, Loader, Stream, find_files, split_files
from ..errors import RunError
from ..state.engine import TrainState
from . import allocator
from .identity import differences, identity
from .launch import (
    Options,
    check,
    check_folder,
    check_options,
    connect,
    going_on,
    is_first,
    mesh_words,
    parse,
    settle_streams,
    torchrun,
    warn,
)
from .log import Log
from .shutdown import ending, refuse
from .speed import Speed

Build = Callable[[Mesh], tuple[nn.Module, TrainState]]
TrainStep = Callable[[nn.Module, TrainState, Batch, float], Metrics]
EvalStep = Callable[[nn.Module, TrainState, Batch], Metrics]

_EVAL_BATCHES = 8
_LEFT = ("log.jsonl", "checkpoints", "recorded")
"""Files that a run leaves in its folder."""


def train(plan: Plan, build: Build, train_step: TrainStep, eval_step: EvalStep) -> None:
    """Runs the program from the command line: checks, connects, trains, validates, saves; or exports what was saved.

    Exit status 0, 1 where the run failed, 2 where it could not start.
    """
    settle_streams()
    try:
        options = parse(plan)
        for warning in unknown():
            warn(warning)
        check_options(plan, options)
        if options.export:
            _export(plan, options, options.export)
            return
        check(plan, options)
        mesh = connect(plan, options.device)
        start = _start(plan, options, mesh.device)
    except (RunError, OSError) as error:
        refuse(error)
    with ending():
        _Run(plan, options, mesh, start, build, train_step, eval_step).go()


@dataclass(frozen=True)
class _Start:
    """The start of a run: its data, weights or a checkpoint if it continues from one, and its first lines."""

    run: Identity
    training: Stream
    validation: Stream | None
    weights: Reader | None
    resume: Path | None
    first: int
    notes: tuple[str, ...]


def _start(plan: Plan, options: Options, device: torch.device) -> _Start:
    """The start of the run, equal on all ranks; moves an earlier run's files away.  RunError on all.  Collective."""
    start = together(device, lambda: _prepare(plan, options))
    agreed(device, f"step {start.first} of {dict(start.run)}")
    moved = together(device, lambda: _set_aside(options.out) if is_first() and not options.resume else [])
    return replace(start, notes=(*moved, *start.notes))


def _prepare(plan: Plan, options: Options) -> _Start:
    """Opens the data and the weights, and finds the checkpoint.  RunError if any is not there or not enough."""
    training, held = split_files(find_files(options.data), plan.data.holdout)
    resume = saver.newest(_checkpoints(options)) if options.resume else None
    if options.resume and resume is None:
        raise RunError(f"nothing to resume: no checkpoint in {_checkpoints(options)}")
    first = saver.finished_steps(resume) if resume else 0
    if first >= options.steps:
        raise RunError(f"{resume} has finished its {first} steps already: ask for more with --steps {2 * first}")
    if (asked := profiling()) and asked.first > options.steps - first:
        raise RunError(f"SCALEC_PROFILE asks for step {asked.first} of this run, which has {options.steps - first}")
    check_folder(options.out)
    run, width = identity(plan, options.seed, training), plan.data.width(plan.seq)
    changes = _changes(resume, run, options.resume_anyway) if resume else []
    validation = Stream(held, plan.data.dtype, width) if held else None
    reader = Reader(options.init, plan.names) if options.init and plan.names else None
    stream = Stream(training, plan.data.dtype, width)
    if few := _few(stream, plan):
        raise RunError(f"too little data: {few}, so that a step would see some twice")
    if validation and (few := _few(validation, plan)):
        changes.append(f"validation sees some sequences twice: {few}")
    return _Start(run, stream, validation, reader, resume, first, (*changes,))


def _few(stream: Stream, plan: Plan) -> str:
    """The problem of a stream that is shorter than a batch; empty if it is not."""
    if stream.windows >= plan.global_batch:
        return ""
    made = f"{stream.tokens:,} tokens make {stream.windows:,} sequences of {plan.data.width(plan.seq):,}"
    return f"{made}, fewer than the {plan.global_batch:,} of a global batch"


def _changes(resume: Path, run: Identity, anyway: bool) -> list[str]:
    """How the run differs from the one that it goes on with.  RunError unless it is to go on `anyway`."""
    found = differences(Saved(resume).run, run, saver.finished_steps(resume))
    if found and not anyway:
        more = "this run would not go on with that one; if it is to, --resume-anyway in place of --resume"
        raise RunError(f"{resume} is of another run", *found, more)
    return found


def _export(plan: Plan, options: Options, folder: Path) -> None:
    """Writes the newest checkpoint as files of weights.  RunError."""
    from ..checkpoint.export import export  # most runs do without

    saved = saver.newest(_checkpoints(options))
    if saved is None:
        raise RunError(f"nothing to export: no checkpoint in {_checkpoints(options)}")
    assert plan.names, "loop: check_options lets an export without names pass"
    names = replace(plan.names, dtype=options.export_dtype) if options.export_dtype else plan.names
    export(saved, folder, names)
    print(f"wrote {saved} to {folder}; the model's config.json and tokenizer belong beside it")


def _checkpoints(options: Options) -> Path:
    return options.out / "checkpoints"


class _Run:
    """One run of the program on this rank, from the first step to the last."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        mesh: Mesh,
        start: _Start,
        build: Build,
        train_step: TrainStep,
        eval_step: EvalStep,
    ) -> None:
        self.plan, self.options, self.start = plan, options, start
        self.train_step, self.eval_step = train_step, eval_step
        self.mesh = mesh
        self.model, self.state = build(self.mesh)
        self.loader = self._loader(start.training)
        self.held = self._loader(start.validation) if start.validation else None
        self.speed = self._speed()
        self.log = self._log()
        self.saved = _checkpoints(options)

    def _loader(self, stream: Stream) -> Loader:
        plan, seed = self.plan, self.options.seed
        return Loader(stream, plan.data, plan.inputs, self.mesh, plan.global_batch, plan.microbatches, plan.vocab, seed)

    def _log(self) -> Log:
        folder = self.options.out if is_first() else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        asked = profiling()
        warm_up = asked.last if asked else 1
        return Log(folder, self.start.first, self.options.steps, self.speed, self.plan.choices, warm_up)

    def _speed(self) -> Speed:
        """Throughput beside the prediction, which knows nothing of what is done besides to find mistakes."""
        plan, mesh = self.plan, self.mesh
        expected = None if recording() or sanitizing() else plan.expected
        return Speed(plan.global_batch * plan.seq, mesh.size(*plan.mesh), mesh.device, expected)

    def go(self) -> None:
        """Trains up to the last step."""
        if sanitizing():
            self._sanitize()
        with ExitStack() as observers:
            if asked := profiling():
                observers.enter_context(self._profiler(asked))
            if recording():
                observers.enter_context(self._recorder())
            self._begin()
            allocator.forget(self.mesh.device)
            for step in range(self.start.first, self.options.steps):
                lr = self.plan.schedule.lr(step, self.options.steps, self.options.lr)
                metrics = self.train_step(self.model, self.state, self.loader.batch(step), lr)
                self._after(step + 1, metrics, lr)
        self.log.summary(self.saved, going_on(self.plan, 2 * self.options.steps), torchrun(self.plan, "--help"))

    def _sanitize(self) -> None:
        """Inputs and metrics are compared too, and differences know their step."""
        from ..debug.sanitize import observed  # most runs do without

        inputs = self.plan.inputs
        self.train_step = observed(self.train_step, self.mesh, inputs, "step", self.start.first)
        self.eval_step = observed(self.eval_step, self.mesh, inputs, "validation batch", 0)

    def _profiler(self, asked: Profiled) -> AbstractContextManager[Any]:
        """Profiles some steps while entered."""
        from ..debug.profile import Profiler  # most runs do without

        profiler = Profiler(asked, self.model, self.mesh.device, self.start.first)
        self.train_step = profiler.of(self.train_step)
        self.log.slow_lines = profiler.slow_lines
        return profiler

    def _recorder(self) -> AbstractContextManager[Any]:
        """Records collectives while entered, and knows the steps and evaluations from what else the loop does."""
        from ..debug.record import Recorder  # most runs do without

        recorder = Recorder(self.options.out / "recorded", self.plan, self.start.first)
        self.train_step = recorder.of("train", self.train_step)
        self.eval_step = recorder.of("evaluate", self.eval_step)
        return recorder

    def _begin(self) -> None:
        for note in self.start.notes:
            self.log.say(note)
        if self.start.weights is not None:
            self.start.weights.fill(self.state)
            self.log.say(f"beginning with {self.start.weights}")
        elif self.start.resume is None:
            self.state.initialise(self.options.seed)
        else:
            saver.load(self.start.resume, self.state)
            self.log.say(f"resuming from {self.start.resume}")
        mesh = f"mesh {mesh_words(self.plan)}" if self.plan.mesh else "one rank"
        self.log.say(
            f"{self.plan.name} on {self.mesh.device.type}, {mesh}: steps {self.start.first + 1} to"
            f" {self.options.steps}, each of {self.plan.global_batch} x {self.plan.seq} tokens"
        )
        if self.start.resume is None and (predicted := self.speed.begin()):
            self.log.say(predicted)
        self.log.mark(self.start.first)

    def _after(self, done: int, metrics: Metrics, lr: float) -> None:
        """The tasks due after `done` steps; all are due after the last."""

        def due(every: int) -> bool:
            return done % every == 0 or done == self.options.steps

        if done == self.start.first + 1 and (of := self.plan.account):
            account = of.at(self.mesh.rank(of.axis) if of.axis else 0)
            self.log.memory(done, account, of, allocator.peak(self.mesh.device))
        self.log.settle()  # the step before this one
        self.log.step(done, metrics, lr, due(self.options.log_every))
        if due(self.options.save_every) or (self.held and due(self.options.eval_every)):
            self.log.settle()  # before weights that may not be finite are saved
        if self.held and due(self.options.eval_every):
            self.log.validation(done, self._validate(self.held))
            self.log.mark(done)
        if due(self.options.save_every):
            self.saved = saver.save(_checkpoints(self.options), done, self.state, run=self.start.run)
            self.log.mark(done)

    @torch.no_grad()
    def _validate(self, held: Loader) -> Metrics:
        """Mean loss of a token over the first batches of the held-out data, the same ones each time."""
        parts = [self.eval_step(self.model, self.state, held.batch(i)) for i in range(min(_EVAL_BATCHES, held.batches))]
        tokens = torch.stack([part.tokens for part in parts])
        losses = torch.stack([part.loss for part in parts])
        return Metrics(loss=(losses * tokens).sum() / tokens.sum(), tokens=tokens.sum())


def _set_aside(folder: Path) -> list[str]:
    """Moves what an earlier run left into a folder of its own, so that it is not taken for ours, and says so."""
    earlier = [path for name in _LEFT if (path := folder / name).exists()]
    if not earlier:
        return []
    number = next(n for n in range(1, 1 << 30) if not (folder / f"earlier-{n}").exists())
    target = folder / f"earlier-{number}"
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    return [f"moved an earlier run ({', '.join(path.name for path in earlier)}) from {folder} to {target}"]
