"""In which order an emitted program begins exchanges of rows, computes, and waits, in forward and
in backward.

One rank of two, on a group that stands in for its peer: what the peer sends is what this rank
does.  A product is known by its sizes: of a shared expert, of a rank's experts, or the gradient of
an expert's weight.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.forked_ranks import plain_groups
from helpers.oracle import harness
from helpers.programs import load_program
from scalec.runtime import Mesh
from scalec.runtime.comm.mesh import Axis

SHARED, EXPERT, HIDDEN = 72, 56, 48
"""Widths, of which each is more than an expert has rows."""
PLAN = f"""model m(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ vocab = 32  hidden = {HIDDEN}  experts = 4  expert_ffn = {EXPERT}  ffn = {SHARED}  layers = 1 }}
  init ~ normal(0.1)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{
    m = rmsnorm(x, norm[hidden], 1e-5)
    y = m
    route y to experts by top(m @ router[hidden -> experts], 2) {{
      y = (silu(y @ e_gate[hidden -> expert_ffn]) * (y @ e_up[hidden -> expert_ffn])) @ e_down[expert_ffn -> hidden]
    }}
    x = x + y
  }}
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}}
mesh {{ dp = 2 }}
shard {{ experts over dp  batch over dp }}
train {{ seq = 6  global_batch = 4  microbatch = 2  steps = 1  recompute = none
  optimizer sgd {{ lr = 0.1 }}  data text {{ files = [python_stdlib] }} }}
"""
BESIDE = (
    "    s = (silu(m @ s_gate[hidden -> ffn]) * (m @ s_up[hidden -> ffn])) @ s_down[ffn ->"
    " hidden]\n"
)
AFTER = PLAN.replace("    x = x + y\n", BESIDE + "    x = x + y + s\n")
BEFORE = PLAN.replace("    y = m\n", BESIDE + "    y = m\n").replace("x = x + y", "x = x + y + s")

FORWARD = ["begin", "shared", "wait", "expert", "begin", "shared", "wait"]
"""Of rows.

First products of the shared expert run beside the exchange to the experts, the last beside the
other.
"""
BACKWARD = ["begin", "shared", "wait", "expert", "begin", "weight", "shared", "wait"]


class Events(TorchDispatchMode):
    """What happens, in order: exchanges that begin and are awaited, and products of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self._product([x for x in args if isinstance(x, Tensor)][-2:])
        return func(*args, **(kwargs or {}))

    def _product(self, operands: Sequence[Tensor]) -> None:
        (rows, inner), (_, columns) = (x.shape for x in operands)
        if SHARED in (rows, inner, columns):
            self.found.append("shared")
        elif EXPERT in (rows, inner, columns):
            self.found.append("weight" if {rows, columns} == {EXPERT, HIDDEN} else "expert")

    def alltoall_base(self, out: Tensor, whole: Tensor, *splits: list[int]) -> "Work":
        """In the place of a group's: rows of a peer that has as many for this rank as this has
        for itself.
        """
        if splits[0]:
            self.found.append("begin")
            out.fill_(torch.nan)
        return Work(self, out, whole, bool(splits[0]))


class Work:
    """An exchange under way, of rows or of their counts; what comes is there when it is
    awaited, and NaN before.
    """

    def __init__(self, events: Events, out: Tensor, whole: Tensor, is_of_rows: bool) -> None:
        self._events, self._out, self._whole, self._is_of_rows = events, out, whole, is_of_rows

    def wait(self) -> None:
        self._out.copy_(self._whole)
        if self._is_of_rows:
            self._events.found.append("wait")


class SpiedMesh(Mesh):
    def __init__(self, axes: dict[str, int], events: Events) -> None:
        super().__init__(axes)
        self._events = events

    def axis(self, *names: str) -> Axis:
        axis = super().axis(*names)
        return axis if axis.size == 1 else replace(axis, group=self._events)


def events(plan: str, folder: Path) -> tuple[list[str], list[str]]:
    """Of forward and of backward, neighbours that are alike once.

    Fails where anything reads rows before they come.
    """
    module, spy = load_program(plan, folder), Events()
    with plain_groups():
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            model, state = module.build(SpiedMesh(module.PLAN.mesh, spy))
            state.initialise(0)
            tokens = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))
            rows = next(iter(harness.local_batch(module.PLAN, tokens, tokens).microbatches()))
            with spy:
                loss, _ = model(*rows)  # and how many tokens chose each expert
                forward, spy.found = spy.found, []
                loss.backward()
        finally:
            dist.destroy_process_group()
    assert all(
        bool(it.isfinite().all())
        for it in (loss, *(p.grad for p in model.parameters() if p.grad is not None))
    )
    return [event for event, _ in groupby(forward)], [event for event, _ in groupby(spy.found)]


@pytest.mark.parametrize("plan", [BEFORE, AFTER], ids=["before", "after"])
def test_a_shared_expert_runs_beside_exchanges(plan: str, tmp_path: Path) -> None:
    """Wherever the plan has it; in backward gradients of experts' weights do, too."""
    assert events(plan, tmp_path) == (FORWARD, BACKWARD)


def test_recomputed_layers_begin_and_wait_in_that_order(tmp_path: Path) -> None:
    assert events(AFTER.replace("recompute = none", "recompute = full"), tmp_path) == (
        FORWARD,
        FORWARD + BACKWARD,
    )


def test_without_a_shared_expert_only_gradients_of_weights_run_beside(tmp_path: Path) -> None:
    forward, backward = events(PLAN, tmp_path)
    assert forward == ["begin", "wait", "expert", "begin", "wait"]
    assert backward == ["begin", "wait", "expert", "begin", "weight", "wait"]


def test_rows_that_are_dispatched_twice_are_awaited_at_once(tmp_path: Path) -> None:
    """What backward recomputes by itself it begins and awaits there; the exchange back runs
    beside the whole expert.
    """
    forward, backward = events(
        AFTER.replace("recompute = none", "recompute = selective(dispatch)"), tmp_path
    )
    assert forward == ["begin", "wait", "expert", "begin", "shared", "wait"]
    assert backward[:3] == ["begin", "shared", "wait"]
