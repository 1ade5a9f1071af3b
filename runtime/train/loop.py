"""The training loop: batches, steps, log lines, checkpoints."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from ..checkpoint import saver
from ..checkpoint.background import Saver
from ..comm.mesh import Mesh
from ..comm.store import job_store
from ..config.environment import profiling, recording, sanitizing, tracing, unknown_variable_lines
from ..config.interrupts import end_at_once
from ..config.plan import Metrics, Plan
from ..config.versions import library_lines
from ..data.loader import Batch, Loader
from ..data.mixture import Mixture
from ..data.prefetch import ahead
from ..data.window_check import EVERY
from ..errors import RunError
from ..state.engine import TrainState
from . import allocator
from .elastic import fit_to_ranks, releasing
from .launch import (
    check,
    check_options,
    connect,
    end_with_launcher,
    is_first,
    settle,
    settle_streams,
    warn,
)
from .log import Log
from .options import Options, going_on, mesh_words, parse, torchrun
from .progress import Progress
from .same_state import SameState
from .shutdown import end_interrupted, ending, refuse
from .sinks import Sinks
from .speed import Speed
from .start import Start, checkpoints, export_newest, start
from .stop import Stop, Stopped
from .watchdog.limits import Kind
from .watchdog.watcher import Watchdog, watch
from .watching import TrainStep, Watching

Build = Callable[[Mesh], tuple[nn.Module, TrainState]]
EvalStep = Callable[[nn.Module, TrainState, Batch], Metrics]

_EVAL_BATCHES = 8

# steps that have a line, however few lines `--log-every` asks for: they show whether a run learns
_FIRST_STEPS = 3


def train(plan: Plan, build: Build, train_step: TrainStep, eval_step: EvalStep) -> None:
    """Runs the program from the command line: checks, connects, trains, validates, saves; or
    exports the newest checkpoint.

    Exit status 0; 1 where the run failed, 2 where it could not start, 75 where a signal has stopped
    it and it is saved.
    """
    settle_streams()
    end_with_launcher()
    watchdog = None
    try:
        end_at_once()
        options = parse(plan)
        for warning in unknown_variable_lines():
            warn(warning)
        check_options(plan, options)
        if options.export:
            export_newest(plan, options, options.export)
            return
        plan, spare = fit_to_ranks(plan, options)
        check(plan, options)
        mesh = connect(plan, options)
        watchdog = watch(mesh, plan, options)
        begin = start(plan, options)
    except (RunError, OSError) as error:
        refuse(error, watchdog)
    except KeyboardInterrupt:
        end_interrupted()
    with ending(watchdog), releasing(spare):
        if begin.first < options.steps:
            _Run(plan, options, mesh, begin, build, train_step, eval_step, watchdog).go()
        elif is_first():
            print(
                f"{begin.resume} has finished its {begin.first} steps already: there is"
                " nothing to do"
            )


class _Run:
    """One run of the program on this rank, from the first step to the last."""

    def __init__(
        self,
        plan: Plan,
        options: Options,
        mesh: Mesh,
        start: Start,
        build: Build,
        train_step: TrainStep,
        eval_step: EvalStep,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.plan, self.options, self.start = plan, options, start
        self.watchdog = watchdog
        self.train_step, self.eval_step = train_step, eval_step
        self.mesh = mesh
        with mesh.asking():
            self.model, self.state = build(mesh)
        self.loader = self._loader(start.training)
        self.held = self._loader(start.validation) if start.validation else None
        self._compare_windows()
        # the prediction does not count the time that these take
        is_observed = recording() or sanitizing() or tracing()
        expected = None if is_observed else plan.prediction.expected
        self.speed = Speed(
            plan.global_batch * plan.seq, mesh.size(*plan.mesh), mesh.device, expected
        )
        self.log = self._log()
        self.watching = Watching(
            plan.watch, self.model, self.state, train_step, self.loader.batch, self.log, plan.inputs
        )
        keep = saver.Keep(options.keep, options.keep_every)
        self.saver = Saver(checkpoints(options), self.state, start.run, keep, start.check_claim)
        self.same_state, self.has_saved = SameState(self.state), False
        self.stop = Stop(start.first)

    def _loader(self, data: Mixture) -> Loader:
        plan, seed = self.plan, self.options.seed
        return Loader(
            data,
            plan.data,
            plan.inputs,
            self.mesh,
            plan.global_batch,
            plan.microbatches,
            plan.vocab,
            seed,
        )

    def _compare_windows(self) -> None:
        """Compares the batches of ranks that read the same data, where there are other ranks.

        Batches of validation are the same each time, and are compared once.
        """
        store = job_store()
        if store is None:
            return
        self.loader.compare_windows("data", EVERY, self.options.steps, store.clone())
        if self.held:
            self.held.compare_windows("validation data", 1, _EVAL_BATCHES, store)

    def _log(self) -> Log:
        folder = self.options.out if is_first() else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        profile, first = profiling(), self.start.first
        warm_up = profile.last if profile else 1
        progress, sinks = None, None
        if folder is not None:
            progress = Progress(sys.stdout, self.mesh.device)
            if self.options.log_to:
                sinks = Sinks(self.options.log_to, folder, first)
        return Log(
            folder,
            first,
            self.options.steps,
            self.speed,
            self.plan.choices,
            warm_up,
            progress,
            sinks,
        )

    def go(self) -> None:
        """Trains up to the last step."""
        with ExitStack() as observers:
            observers.callback(self.log.close)
            for observer in self._observers():
                observers.enter_context(observer)
            self._begin()
            observers.enter_context(self.saver)
            allocator.forget(self.mesh.device)
            prepared = observers.enter_context(
                ahead(self.loader.make_host_batch, self.options.steps, self.mesh.device)
            )
            observers.enter_context(self.stop.listening())
            for step in range(self.start.first, self.options.steps):
                self._doing("step", step + 1)
                lr = self.plan.schedule.lr(step, self.options.steps, self.options.lr)
                batch = prepared.get_batch(step).to(self.mesh.device)
                begin = partial(self._doing, "step", step + 1)
                metrics = self.watching.step(step + 1, batch, lr, self.train_step, begin)
                if self._after(step + 1, metrics, lr):
                    self._end_stopped(step + 1)
            self._finish_save(self.options.steps)
            self._doing("end", self.options.steps)
        self.log.summary(
            self.saver.newest,
            going_on(self.plan, 2 * self.options.steps),
            torchrun(self.plan, "--help"),
        )

    def _end_stopped(self, steps_done: int) -> NoReturn:
        """Ends a run that a signal has stopped after `done` steps, and that is saved."""
        self._finish_save(steps_done)
        self._doing("end", steps_done)
        further = going_on(self.plan, self.options.steps)
        self.log.say(
            f"stopped by {self.stop.signal}: saved {self.saver.newest}\n  to go on    {further}"
        )
        raise Stopped(self.stop.status)

    def _doing(self, kind: Kind, step: int) -> None:
        """Tells the watchdog, if there is one, what this rank begins to do."""
        if self.watchdog is not None:
            self.watchdog.begin(kind, step)

    def _observers(self) -> Iterator[AbstractContextManager[Any]]:
        """The observers that variables of the environment ask for, as context managers around the
        run; most runs have none.
        """
        if sanitizing():  # inputs and metrics are compared too, and differences know their step
            from ..debug.sanitize import observe

            inputs = self.plan.inputs
            self.train_step = observe(self.train_step, self.mesh, inputs, "step", self.start.first)
            self.eval_step = observe(self.eval_step, self.mesh, inputs, "validation batch", 0)
        if profile := profiling():
            from ..debug.profile import Profiler

            profiler = Profiler(profile, self.model, self.mesh.device, self.start.first)
            self.train_step = profiler.of(self.train_step)
            self.log.slow_lines = profiler.slow_lines
            yield profiler
        if recording():
            from ..debug.record import Recorder

            yield self._wrap_steps(
                Recorder(self.options.out / "recorded", self.plan, self.start.first)
            )
        if tracing():
            from ..debug.record import CallLog
            from .watchdog.position import order

            yield self._wrap_steps(
                CallLog(self.start.first, lambda evaluates: order(self.mesh, evaluates)())
            )

    def _wrap_steps(self, observer: Any) -> AbstractContextManager[Any]:
        """Puts an observer of collectives around steps and evaluations, so that it can tell their
        collectives from all others.
        """
        self.train_step = observer.of("train", self.train_step)
        self.eval_step = observer.of("evaluate", self.eval_step)
        return observer

    def _begin(self) -> None:
        for note in (*self.start.notes, *library_lines(self.mesh.device)):
            self.log.say(note)
        if self.start.weights is not None:
            self.start.weights.fill(self.state)
            self.log.say(f"beginning with {self.start.weights}")
        elif self.start.resume is None:
            self.state.initialise(self.options.seed)
        else:
            saver.load(self.start.resume, self.state, self.plan.padded_rows)
            self.log.say(f"resuming from {self.start.resume}")
        self.same_state.require("before the first step")
        mesh = f"mesh {mesh_words(self.plan)}" if self.plan.mesh else "one rank"
        self.log.say(
            f"{self.plan.name} on {self.mesh.device.type}, {mesh}: steps {self.start.first + 1} to"
            f" {self.options.steps}, each of {self.plan.global_batch} x {self.plan.seq} tokens"
        )
        if self.start.resume is None and (predicted := self.speed.begin()):
            self.log.say(predicted)
        self.log.mark(self.start.first)

    def _after(self, steps_done: int, metrics: Metrics, lr: float) -> bool:
        """Does the tasks that are due after `done` steps; all are due after the last.

        Returns whether a signal stops the run here.
        """
        stops = steps_done < self.options.steps and self.stop.after(steps_done)

        def due(every: int) -> bool:
            return steps_done % every == 0 or steps_done == self.options.steps or stops

        if steps_done == self.start.first + 1:
            settle(self.mesh, self.options, self.held is not None)
            self._compare_memory(steps_done)
        if self.start.claim:
            self.start.claim.check(now=due(self.options.save_every))
        self.watching.after(steps_done, metrics)
        self.log.settle()  # the step before this one
        self.log.step(
            steps_done, metrics, lr, steps_done <= _FIRST_STEPS or due(self.options.log_every)
        )
        if due(self.options.save_every) or (self.held and due(self.options.eval_every)):
            self.watching.settle()  # only steps that are known to be finite are saved
            self.log.settle()
        if self.held and due(self.options.eval_every) and not stops:
            self._doing("validation", steps_done)
            self.log.validation(steps_done, self._validate(self.held))
            self.log.mark(steps_done)
        if due(self.options.save_every):
            self._doing("save", steps_done)
            if not self.has_saved:
                self.same_state.require("before the first save")
                self.has_saved = True
            self.saver.begin(steps_done)
            self.log.mark(steps_done)
        self._tell_saves()
        return stops

    def _compare_memory(self, steps_done: int) -> None:
        """Logs the peak of memory beside the compiler's account, where the plan has one."""
        plan_account = self.plan.prediction.account
        if not plan_account:
            return
        place = self.mesh.rank(plan_account.axis) if plan_account.axis else 0
        peak = allocator.peak(self.mesh.device)
        self.log.memory(steps_done, plan_account.at(place), plan_account, peak)

    def _tell_saves(self) -> None:
        """Logs lines about saves that met trouble.  RunError where a state was not finite."""
        for line in self.saver.news():
            self.log.say(line)
        self.saver.check()

    def _finish_save(self, steps_done: int) -> None:
        """Waits until the last save, after `done` steps, is on the disk.

        RunError if it has failed.
        """
        self._doing("save", steps_done)
        self.saver.wait()
        self._tell_saves()
        self.saver.require()

    @torch.no_grad()
    def _validate(self, loader: Loader) -> Metrics:
        """Mean loss of a token over the first batches of the held-out data, the same ones each
        time.
        """
        losses, tokens = list[torch.Tensor](), list[torch.Tensor]()
        for number in range(min(_EVAL_BATCHES, loader.batches)):
            metrics = self.eval_step(self.model, self.state, loader.batch(number))
            losses.append(metrics.loss)
            tokens.append(metrics.tokens)
        counts = torch.stack(tokens)
        total = counts.sum()
        return Metrics(loss=(torch.stack(losses) * counts).sum() / total, tokens=total)
