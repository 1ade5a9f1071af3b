"""The training loop: batches in, lines out, checkpoints now and then.

Non-goals: the step itself (the emitted program's), and what it communicates.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import checkpoint
from .data import Batch, Loader, Stream, find_files, split_files
from .ending import ending
from .errors import RunError
from .launch import (
    Options,
    Profiled,
    check,
    check_options,
    connect,
    going_on,
    is_first,
    mesh_words,
    parse,
    profiling,
    recording,
    sanitizing,
    settle_streams,
    torchrun,
)
from .log import Log
from .mesh import Mesh
from .plan import Metrics, Plan
from .state import State
from .weights import Reader

Build = Callable[[Mesh], tuple[nn.Module, State]]
TrainStep = Callable[[nn.Module, State, Batch, float], Metrics]
EvalStep = Callable[[nn.Module, State, Batch], Metrics]

_EVAL_BATCHES = 8


def train(plan: Plan, build: Build, train_step: TrainStep, eval_step: EvalStep) -> None:
    """Runs the program from the command line: checks, connects, trains, validates, saves; or exports what was saved.

    Exit status 0, 1 where the run failed, 2 where it could not start.
    """
    settle_streams()
    options = parse(plan)
    try:
        check_options(plan, options)
        if options.export:
            _export(plan, options, options.export)
            return
        check(plan, options)
        start = _prepare(plan, options)
    except RunError as error:
        if is_first():
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    with ending():
        _Run(plan, options, start, build, train_step, eval_step).go()


@dataclass(frozen=True)
class _Start:
    """What a run begins from: its data, and weights or a checkpoint if it goes on from such."""

    training: Stream
    validation: Stream | None
    weights: Reader | None
    resume: Path | None
    first: int


def _prepare(plan: Plan, options: Options) -> _Start:
    """Opens the data and the weights, and finds the checkpoint.  RunError if any is not there or not enough."""
    training, held = split_files(find_files(options.data), plan.data.holdout)
    resume = checkpoint.newest(_checkpoints(options)) if options.resume else None
    if options.resume and resume is None:
        raise RunError(f"nothing to resume: no checkpoint in {_checkpoints(options)}")
    first = checkpoint.finished_steps(resume) if resume else 0
    if first >= options.steps:
        raise RunError(f"{resume} has finished its {first} steps already: ask for more with --steps {2 * first}")
    if (asked := profiling()) and asked.first > options.steps - first:
        raise RunError(f"SCALEC_PROFILE asks for step {asked.first} of this run, which has {options.steps - first}")
    return _Start(
        Stream(training, plan.data.dtype, plan.data.width(plan.seq)),
        Stream(held, plan.data.dtype, plan.data.width(plan.seq)) if held else None,
        Reader(options.init, plan.names) if options.init and plan.names else None,
        resume,
        first,
    )


def _export(plan: Plan, options: Options, folder: Path) -> None:
    """Writes the newest checkpoint as files of weights.  RunError."""
    from .export import export  # most runs do without

    saved = checkpoint.newest(_checkpoints(options))
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
        self, plan: Plan, options: Options, start: _Start, build: Build, train_step: TrainStep, eval_step: EvalStep
    ) -> None:
        self.plan, self.options, self.start = plan, options, start
        self.train_step, self.eval_step = train_step, eval_step
        self.mesh = connect(plan, options.device)
        self.model, self.state = build(self.mesh)
        self.loader = self._loader(start.training)
        self.held = self._loader(start.validation) if start.validation else None
        self.log = self._log()
        self.saved = _checkpoints(options)

    def _loader(self, stream: Stream) -> Loader:
        plan, seed = self.plan, self.options.seed
        return Loader(stream, plan.data, plan.inputs, self.mesh, plan.global_batch, plan.microbatches, plan.vocab, seed)

    def _log(self) -> Log:
        folder = self.options.out if is_first() else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.options.resume:
                _set_aside(folder)
        return Log(folder, self.start.first, self.options.steps, self.plan.global_batch * self.plan.seq)

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
            for step in range(self.start.first, self.options.steps):
                lr = self.plan.schedule.lr(step, self.options.steps, self.options.lr)
                metrics = self.train_step(self.model, self.state, self.loader.batch(step), lr)
                self._after(step + 1, metrics, lr)
        self.log.summary(self.saved, going_on(self.plan, 2 * self.options.steps), torchrun(self.plan, "--help"))

    def _sanitize(self) -> None:
        """Inputs and metrics are compared too, and differences know their step."""
        from .sanitize import observed  # most runs do without

        inputs = self.plan.inputs
        self.train_step = observed(self.train_step, self.mesh, inputs, "step", self.start.first)
        self.eval_step = observed(self.eval_step, self.mesh, inputs, "validation batch", 0)

    def _profiler(self, asked: Profiled) -> AbstractContextManager[Any]:
        """Profiles some steps while entered."""
        from .profile import Profiler  # most runs do without

        profiler = Profiler(asked, self.model, self.mesh.device, self.start.first)
        self.train_step = profiler.of(self.train_step)
        return profiler

    def _recorder(self) -> AbstractContextManager[Any]:
        """Records collectives while entered, and knows the steps and evaluations from what else the loop does."""
        from .record import Recorder  # most runs do without

        recorder = Recorder(self.options.out / "recorded", self.plan, self.start.first)
        self.train_step = recorder.of("train", self.train_step)
        self.eval_step = recorder.of("evaluate", self.eval_step)
        return recorder

    def _begin(self) -> None:
        if self.start.weights is not None:
            self.start.weights.fill(self.state)
            self.log.say(f"beginning with {self.options.init}")
        elif self.start.resume is None:
            self.state.initialise(self.options.seed)
        else:
            checkpoint.load(self.start.resume, self.state)
            self.log.say(f"resuming from {self.start.resume}")
        mesh = f"mesh {mesh_words(self.plan)}" if self.plan.mesh else "one rank"
        self.log.say(
            f"{self.plan.name} on {self.mesh.device.type}, {mesh}: steps {self.start.first + 1} to"
            f" {self.options.steps}, each of {self.plan.global_batch} x {self.plan.seq} tokens"
        )
        self.log.mark(self.start.first)

    def _after(self, done: int, metrics: Metrics, lr: float) -> None:
        """What is due after `done` steps; everything is due after the last."""

        def due(every: int) -> bool:
            return done % every == 0 or done == self.options.steps

        self.log.settle()  # the step before this one
        if due(self.options.log_every):
            self.log.step(done, metrics, lr)
        if due(self.options.save_every) or (self.held and due(self.options.eval_every)):
            self.log.settle()  # before weights that may not be finite are saved
        if self.held and due(self.options.eval_every):
            self.log.validation(done, self._validate(self.held))
            self.log.mark(done)
        if due(self.options.save_every):
            self.saved = checkpoint.save(_checkpoints(self.options), done, self.state)
            self.log.mark(done)

    @torch.no_grad()
    def _validate(self, held: Loader) -> Metrics:
        """Mean loss of a token over the first batches of the held-out data, the same ones each time."""
        parts = [self.eval_step(self.model, self.state, held.batch(i)) for i in range(min(_EVAL_BATCHES, held.batches))]
        tokens = torch.stack([part.tokens for part in parts])
        losses = torch.stack([part.loss for part in parts])
        return Metrics(loss=(losses * tokens).sum() / tokens.sum(), tokens=tokens.sum())


def _set_aside(folder: Path) -> None:
    """Moves an earlier run's record and checkpoints into a folder of their own, so that they are not taken for ours."""
    earlier = [path for path in (folder / "log.jsonl", folder / "checkpoints") if path.exists()]
    if earlier:
        number = next(n for n in range(1, 1 << 30) if not (folder / f"earlier-{n}").exists())
        target = folder / f"earlier-{number}"
        target.mkdir()
        for path in earlier:
            path.rename(target / path.name)
