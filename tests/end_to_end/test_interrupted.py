"""Sequences of interruptions of a run: kills, failing saves, damaged ones, other plans; none loses
anything.

The reference of a state is an undisturbed run under the same plans, step for step: it is the same
to the last bit.  Under whichever plans, it is that of one plan but for the order of sums: all is in
float64.
"""

import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from torch import Tensor

from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime.checkpoint.reader import Saved
from scalec.runtime.errors import RunError
from scalec.testing.faults import (
    Action,
    Event,
    Fault,
    Outcome,
    Point,
    Program,
    Scene,
    disk_full,
    fork,
    kill,
)

STEPS, EVERY = 12, 2
OPTIONS = (
    f"--device=cpu --steps={STEPS} --save-every={EVERY} --log-every=1 --data=corpus.bin"
    " --resume=auto"
)
CHECKPOINTS = Path("runs", "tiny", "checkpoints")
OF_SAVES: tuple[Event, ...] = ("prepare", "write", "sync", "publish")
PLANS = {
    "one": Case(microbatches=4, optimizer="groups", clip=1.0),
    "tp": Case(tp=2, microbatches=4, optimizer="groups", clip=1.0),
    "zero 1": Case(dp=2, microbatches=2, optimizer="groups", clip=1.0, state="zero 1 over dp"),
    "dp tp": Case(dp=2, tp=2, sp=True, microbatches=2, optimizer="groups", clip=1.0),
    "zero 3": Case(dp=4, optimizer="groups", clip=1.0, state="zero 3 over dp"),
}
History = tuple[str, ...]
"""The plan of each step of a state."""
State = dict[str, Tensor]


class Interrupted(RuleBasedStateMachine):
    """One run folder, and what whole checkpoints it should have."""

    plans = tuple(PLANS)

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.saved: dict[int, History] = {0: ()}

    @property
    def reached(self) -> int:
        """The last step that is saved."""
        return max(self.saved)

    def teardown(self) -> None:
        """Goes on to the end, whatever has been."""
        self._goes_on(self.plans[0])
        assert self.reached == STEPS
        self.it_is_as_if_undisturbed()
        shutil.rmtree(self.folder)

    @rule(data=st.data(), damage=st.booleans(), step=st.integers(1, STEPS), alone=st.booleans())
    def killed_in_a_step(self, data: st.DataObject, damage: bool, step: int, alone: bool) -> None:
        """One rank, or all of them; steps that were done before are not done a second time.

        The last save may be under way, that before it is done.
        """
        plan = data.draw(st.sampled_from(self.plans))
        self._damage(damage)
        ranks, was = range(PLANS[plan].ranks), self.reached
        ended = self._goes_on(
            plan, Fault(Point("step", step, ranks[-1]), kill() if alone else kill(*ranks))
        )
        assert bool(ended.strikes) == (step > was)
        if ended.strikes:
            assert ended.statuses[-1] == -signal.SIGKILL
            last = (step - 1) // EVERY * EVERY
            assert self.reached in (max(was, last - EVERY), max(was, last))

    @rule(
        data=st.data(),
        damage=st.booleans(),
        save=st.integers(1, STEPS // EVERY),
        event=st.sampled_from(OF_SAVES),
    )
    def killed_in_a_save(self, data: st.DataObject, damage: bool, save: int, event: Event) -> None:
        """All ranks, by the first: the checkpoint is there, or the one before."""
        self._damage(damage)
        plan, step, was = data.draw(st.sampled_from(self.plans)), save * EVERY, self.reached
        ended = self._goes_on(plan, Fault(Point(event, step), kill(*range(PLANS[plan].ranks))))
        assert bool(ended.strikes) == (step > was)
        if ended.strikes:
            assert self.reached == step - EVERY

    @rule(data=st.data(), damage=st.booleans(), save=st.integers(1, STEPS // EVERY))
    def a_disk_is_full_once(self, data: st.DataObject, damage: bool, save: int) -> None:
        """The run goes on, or ends with the checkpoint before."""
        self._damage(damage)
        plan, step, was = data.draw(st.sampled_from(self.plans)), save * EVERY, self.reached
        ended = self._goes_on(plan, Fault(Point("write", step, PLANS[plan].ranks - 1), disk_full()))
        assert bool(ended.strikes) == (step > was)
        assert self.reached == STEPS if ended.succeeded else self.reached == step - EVERY

    @invariant()
    def it_is_as_if_undisturbed(self) -> None:
        """To the last bit, of the same plans; to rounding, of one."""
        for step, history in self.saved.items():
            if step:
                found = _state(self.folder, step)
                _assert_same(found, _undisturbed(history), 0.0)
                _assert_same(found, _undisturbed(("one",) * step), 1e-9)

    def _damage(self, asked: bool) -> None:
        """One bit of the newest, if there is one before, from which the run goes on.

        No rule of its own: which saves are done may depend on how busy the machine is, and what is
        drawn must not.
        """
        if not asked or len(self.saved) < 2 or 0 in self.saved:
            return
        file = next((self.folder / CHECKPOINTS / f"step-{self.reached:06d}").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        del self.saved[self.reached]

    def _goes_on(self, plan: str, *faults: Fault) -> Outcome:
        """The end of the program of this plan, which goes on from the newest whole checkpoint."""
        shutil.rmtree(self.folder / "faults", ignore_errors=True)
        was, history = self.reached, self.saved[self.reached]
        ended = fork(_program(plan, self.folder), *faults).wait(120)
        assert ended.succeeded or ended.strikes, ended.err
        for step in range(was + EVERY, STEPS + 1, EVERY):
            if _is_whole(self.folder, step):
                self.saved[step] = history + (plan,) * (step - was)
        self.saved = {step: self.saved[step] for step in sorted(self.saved)[-2:]}
        return ended


def _program(plan: str, folder: Path) -> Program:
    case = PLANS[plan]
    write_program(plan_text(case), folder)
    (folder / "corpus.bin").write_bytes(bytes(i * i % 31 for i in range(4000)))
    return Program(folder, case.ranks, OPTIONS)


_known: dict[History, State] = {}


def _undisturbed(history: History) -> State:
    """The state after these steps, of runs that are only ever ended after a step that they
    saved.
    """
    if history not in _known:
        with tempfile.TemporaryDirectory() as folder:
            begun = 0
            for step in range(EVERY, len(history) + 1, EVERY):
                if step == len(history) or history[step] != history[step - 1]:
                    _trained(Path(folder), history[begun], step)
                    begun = step
            _known[history] = _state(Path(folder), len(history))
    return _known[history]


def _trained(folder: Path, plan: str, last: int) -> None:
    """Goes on up to this step under a plan."""
    program = _program(plan, folder)
    saved = folder / CHECKPOINTS / f"step-{last:06d}"
    fork(
        program, Fault(Point("step", last + 1), _KillOnceSaved(saved, kill(*range(program.ranks))))
    ).wait(120)


@dataclass(frozen=True)
class _KillOnceSaved(Action):
    """Waits until a checkpoint is there."""

    path: Path
    kill: Action

    def strike(self, scene: Scene) -> None:
        while not self.path.exists():
            sleep(0.001)
        self.kill.strike(scene)


def _state(folder: Path, step: int) -> State:
    saved = Saved(folder / CHECKPOINTS / f"step-{step:06d}")
    return saved.whole([*saved.tensors()])


def _is_whole(folder: Path, step: int) -> bool:
    try:
        return bool(_state(folder, step))
    except RunError:
        return False


def _assert_same(ours: State, theirs: State, tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(
            ours[key].view_as(value), value, rtol=tolerance, atol=tolerance / 1e3
        )


class FewRanks(Interrupted):
    """On one or two ranks."""

    plans = ("zero 1", "one", "tp")


def _run(machine: type[Interrupted], examples: int, steps: int) -> None:
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(machine, settings=limits)


@pytest.mark.long
def test_interrupted_runs_on_few_ranks_lose_nothing() -> None:
    _run(FewRanks, 2, 5)


@pytest.mark.long
def test_interrupted_runs_lose_nothing() -> None:
    _run(Interrupted, 40, 12)
