"""Emitted programs with their values compared: silent where all is well, and the first wrong value
found and named.

A difference ends one group's ranks, and the others lose them or wait: what was found is read from a
file.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.forked_ranks import HANGS, run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case, plan_text
from helpers.programs import write_program
from scalec.runtime import Batch, Mesh, RunError, TrainState
from scalec.runtime.comm import c10d, collectives
from scalec.runtime.comm.p2p import Message
from scalec.runtime.debug.sanitize import Sanitizer, observe

TP = Case(dp=2, tp=2, microbatches=2, optimizer="adamw", clip=1.0)
SP = Case(dp=2, tp=2, sp=True, microbatches=2, optimizer="adamw", clip=1.0)
STEPS = 2
Fault = Callable[[int, torch.nn.Module, TrainState, Batch], Batch]
"""What goes wrong on this rank before a step, counted from 1, and the batch that the step then
sees.
"""


def _healthy(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
    return batch


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "case",
    [
        Case(dp=2, clip=1.0),
        Case(tp=2, microbatches=2, vocab=False),
        TP,
        SP,
        Case(dp=2, tp=2, sp=True, gathered="regather", precision="bf16", optimizer="adamw"),
        Case(tp=4, kv=1, model="parallel", precision="fp32"),
        Case(
            dp=2,
            tp=2,
            sp=True,
            gathered="regather",
            model="tied",
            valid="silent_rank",
            optimizer="momentum",
        ),
        Case(dp=2, tp=2, sp=True, microbatches=2, recompute="full", model="parallel"),
        Case(tp=2, recompute="selective(attention, silu)", gathered="regather"),
        Case(replicas=2, dp=2, vocab=False),
        Case(replicas=2, dp=2, optimizer="adamw", precision="bf16", state="zero 1 over dp"),
        Case(dp=2, tp=2, sp=True, optimizer="groups", state="zero 1 over dp"),
        Case(pp=2, dp=2, microbatches=4, layers=4, schedule="zbv", state="zero 3 over dp"),
        Case(pp=3, model="tied", microbatches=2, layers=3, clip=1.0, optimizer="adamw"),
        Case(pp=2, tp=2, sp=True, schedule="zb_h1", microbatches=3, stages="[0, 2]", clip=1.0),
        Case(
            dp=2, tp=2, sp=True, model="capacity", experts="dp, tp", recompute="selective(dispatch)"
        ),
        Case(
            dp=2,
            tp=2,
            sp=True,
            model="roomy",
            experts="dp",
            inner=True,
            bounded=True,
            recompute="full",
        ),
        Case(
            dp=2,
            tp=2,
            model="losses",
            experts="dp",
            inner=True,
            recompute="full",
            optimizer="adamw",
        ),
        Case(dp=2, tp=2, model="biased", experts="tp", state="zero 2 over dp"),
    ],
    ids=str,
)
def test_nothing_is_found_where_all_is_well(case: Case, tmp_path: Path) -> None:
    plain, watched = (_run(case, tmp_path, _healthy, sanitized) for sanitized in (False, True))
    assert watched == plain
    assert len(plain[0]) == STEPS


def _run(
    case: Case, folder: Path, fault: Fault, sanitized: bool, inputs: bool = True
) -> list[list[float]]:
    """The losses of each rank."""
    module = harness.load_case(case, folder)
    start, batches = reference.initial(case.config), [*harness.batches(case, STEPS)]
    return run_ranks(
        case.ranks, _reported, folder, module, start, batches, fault, sanitized, inputs
    )


def _reported(folder: Path, *arguments: Any) -> list[float]:
    """`_train`; what it finds goes to a file first, since the end of this rank is an error on
    others.
    """
    try:
        return _train(*arguments)
    except RunError as error:
        (folder / f"found{dist.get_rank()}").write_text(str(error))
        raise


def _train(
    module: ModuleType,
    start: dict[str, Tensor],
    batches: Any,
    fault: Fault,
    sanitized: bool,
    inputs: bool,
) -> list[float]:
    mesh = Mesh(module.PLAN.mesh, watch=Sanitizer(torch.device("cpu")) if sanitized else None)
    model, state = module.build(mesh)
    harness.fill(state, start)
    step = module.train_step
    if sanitized:
        step = observe(step, mesh, module.PLAN.inputs if inputs else {}, "step", 0)
    losses: list[float] = []
    for number, rows in enumerate(batches, 1):
        batch = fault(number, model, state, harness.local_batch(module.PLAN, *rows))
        losses.append(float(step(model, state, batch, 0.01).loss))
    return losses


def _message(case: Case, folder: Path, fault: Fault, inputs: bool = True) -> str:
    """What a rank finds."""
    with pytest.raises(pytest.fail.Exception):
        _run(case, folder, fault, True, inputs)
    return next(folder.glob("found*")).read_text()


# ---- the state


def _in_record(name: str, change: Callable[[Tensor], None]) -> Fault:
    """Before step 2, on rank 3, a change to its part of a record of the state, as int64."""

    def fault(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
        if step == 2 and dist.get_rank() == 3:
            change(harness.kept(state)[name].view(-1).view(torch.int64))
        return batch

    return fault


def _flip(bits: Tensor) -> None:
    bits[5] ^= 1


def _swap(bits: Tensor) -> None:
    bits[[5, 6]] = bits[[6, 5]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [TP, SP], ids=["tp", "sp"])
@pytest.mark.parametrize("change", [_flip, _swap])
def test_a_changed_weight_is_found_within_the_step(case: Case, change: Any, tmp_path: Path) -> None:
    """wq's rows lie over tp: the part of rank 3 begins at row 8."""
    message = _message(case, tmp_path, _in_record("layers.1.wq", change))
    assert message.startswith(
        "step 2, update: layers.1.wq[8, 5] is not the same over dp: rank 1 differs from rank 3, "
    )
    assert "; used at tiny.scale:10, train.py:" in message


def test_a_changed_weight_is_named_where_its_effect_shows_first(tmp_path: Path) -> None:
    """norm1 is whole on every rank: with what it scales, the ranks of tp part in the forward
    already.
    """
    message = _message(TP, tmp_path, _in_record("layers.1.norm1", _flip))
    assert message.startswith(
        "step 2, microbatch 1, forward: `a` at [0, 0, 5] in layers.1 is not the same over tp: "
    )
    assert "rank 2 differs from rank 3" in message
    assert "; at tiny.scale:10, train.py:" in message
    assert (
        "; before it, layers.1.norm1[5] is not the same over tp: rank 2 differs from rank 3, "
        in message
    )


def test_the_rank_in_the_minority_is_named(tmp_path: Path) -> None:
    """With sequence parallelism each rank uses norm1 on tokens of its own."""
    message = _message(SP, tmp_path, _in_record("layers.1.norm1", _flip))
    start = (
        "step 2, update: layers.1.norm1[5] is not the same over dp*tp: rank 3 differs from the"
        " other 3, "
    )
    assert message.startswith(start)


def test_changed_optimizer_state_is_found(tmp_path: Path) -> None:
    message = _message(SP, tmp_path, _in_record("optimizer/exp_avg_sq/wte", _flip))
    assert message.startswith(
        "step 2, update: exp_avg_sq of wte[16, 5] is not the same over dp: rank 1 differs from "
    )


def test_a_changed_working_copy_is_found_though_the_update_mends_it(tmp_path: Path) -> None:
    case = Case(dp=2, precision="bf16", optimizer="adamw")

    def fault(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
        if step == 2 and dist.get_rank() == 1:
            model.get_parameter("layers.0.wo").data.view(torch.int16)[3, 4] ^= 1
        return batch

    message = _message(case, tmp_path, fault)
    assert message.startswith(
        "step 2, update: the working copy of layers.0.wo[3, 4] is not the same over dp: "
    )


def test_bad_values_are_found_before_the_first_step(tmp_path: Path) -> None:
    def fault(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
        if dist.get_rank() == 2:
            harness.kept(state)["norm"][7] += 1
        state.refresh()
        return batch

    message = _message(SP, tmp_path, fault)
    assert message.startswith(
        "before the first step: norm[7] is not the same over dp*tp: rank 2 differs from the "
    )


# ---- what comes in


def _masked(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
    """Rank 3 has a label less than rank 2, with which it shares its rows."""
    if step == 2 and dist.get_rank() == 3:
        batch.labels.view(-1)[(batch.labels.view(-1) >= 0).nonzero()[0]] = -100
    return batch


def test_other_labels_on_one_rank_of_tp_are_found(tmp_path: Path) -> None:
    message = _message(TP, tmp_path, _masked)
    assert message.startswith("step 2, inputs: `labels` at [")
    assert "is not the same over tp: rank 2 differs from rank 3, " in message


def test_another_count_of_labels_is_found_by_what_it_scales(tmp_path: Path) -> None:
    message = _message(TP, tmp_path, _masked, inputs=False)
    assert message.startswith("step 2, microbatch 1, backward: the gradient of `")
    assert " over tp: rank " in message


# ---- coercions that are not done


def _lost(name: str, ends: str) -> Fault:
    """A coercion that from step 2 on does nothing, forward or backward, on any rank."""

    def fault(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
        if step == 2:
            setattr(
                collectives,
                name,
                collectives._conjugate("Lost", ends, collectives._same, collectives._same),
            )
        return batch

    return fault


def test_a_missing_all_reduce_is_found_at_its_first_use(tmp_path: Path) -> None:
    message = _message(TP, tmp_path, _lost("_all_reduce_sum", "PI"))
    assert message.startswith(
        "step 2, microbatch 1, forward: `x` at [0, 0, 0] is not the same over tp: "
    )
    assert "; at tiny.scale:8, train.py:" in message


def test_a_missing_all_reduce_of_a_gradient_is_found_at_its_first_use(tmp_path: Path) -> None:
    """Backward begins with the logits."""
    message = _message(TP, tmp_path, _lost("_replicate", "IR"))
    assert message.startswith("step 2, microbatch 1, backward: the gradient of `n` at [")
    assert "; at tiny.scale:18, train.py:" in message


def test_a_missing_reduction_of_gradients_names_a_parameter(tmp_path: Path) -> None:
    def fault(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
        reduce: Any = dist.all_reduce
        if step == 2:  # of buckets, not of scalars
            dist.all_reduce = lambda x, group: None if x.dim() else reduce(x, group=group)
        return batch

    message = _message(SP, tmp_path, fault)
    assert message.startswith("step 2, forward: the gradient of wte[")
    assert " is not the same over dp: " in message


# ---- pipelines

STAGES = Case(pp=2, tp=2, sp=True, model="tied", microbatches=2, optimizer="adamw", clip=1.0)


def test_a_copy_of_another_stage_that_changed_is_found(tmp_path: Path) -> None:
    """Of wte ranks 1 and 3 have the second half, in the first stage and the last."""
    message = _message(STAGES, tmp_path, _in_record("wte", _flip))
    start = "step 2, update: wte[16, 5] is not the same over pp[0, 1]: rank 1 differs from rank 3, "
    assert message.startswith(start)


def _in_messages(sender: int) -> Fault:
    """In step 2 a rank sends something else than it has."""

    def fault(step: int, model: torch.nn.Module, state: TrainState, batch: Batch) -> Batch:
        begin = Message.begin

        def other(self: Message, memory: Any) -> Any:
            return begin(
                self, tuple(x + 1 for x in memory) if self.call is c10d.begin_send else memory
            )

        if step == 2 and dist.get_rank() == sender:
            Message.begin = other
        return batch

    return fault


@pytest.mark.parametrize(
    ("sender", "found"),
    [
        (
            0,
            "forward: `x` has come to stage 1 otherwise than it was sent, from rank 0 to rank"
            " 2; at tiny.scale:",
        ),
        (
            3,
            "backward: the gradient of `x` has come to stage 0 otherwise than it was sent,"
            " from rank 3 to rank 1; at ",
        ),
    ],
)
def test_what_does_not_come_as_it_was_sent_is_found(
    sender: int, found: str, tmp_path: Path
) -> None:
    message = _message(STAGES, tmp_path, _in_messages(sender))
    assert message.startswith(f"step 2, microbatch 1, {found}")
    assert "train.py:" in message


# ---- as a user runs it


def test_a_run_ends_with_one_line(tmp_path: Path) -> None:
    case = Case(tp=2, sp=True, microbatches=2, optimizer="adamw", clip=1.0)
    program = write_program(plan_text(case), tmp_path) / "train.py"
    lines = program.read_text().replace(
        "    state.update(",
        '    gradients["vectors"][3] += mesh.rank("tp") == 1\n    state.update(',
    )
    program.write_text(lines)
    (tmp_path / "corpus.bin").write_bytes(bytes(i * 7 % 32 for i in range(4000)))
    command = (
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 train.py"
        " --device=cpu --steps=2"
    )
    done = subprocess.run(
        [*command.split(), f"--data={tmp_path}/corpus.bin"],
        cwd=tmp_path,
        env={**os.environ, "SCALEC_SANITIZE": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    # of the weight or, where its sign is right, of an average
    assert errors[0].startswith("error: step 1, update: ")
    assert "layers.0.norm1[3] is not the same over tp: rank 0 differs from rank 1" in errors[0]
