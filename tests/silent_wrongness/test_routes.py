"""Mixtures of experts whose program is right and whose runtime is not: rows 53, 54, 58, 65, 66, 75,
76, 78, 79, 82, 85 and 87.

Each is planted in the runtime and run against plain torch in one process, or under the sanitizer.
Memory that nothing has written holds NaN in these runs (`forked_ranks`).
"""

import faulthandler
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import scalec.runtime
from helpers.forked_ranks import run_ranks
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case
from helpers.planted_runs import LR, first_step, right_step, sanitizer, wrong_gradients
from scalec.runtime import Mesh, combine, exchange_counts, grouped_linear, sort_by_expert, top_k
from scalec.runtime.comm import exchange as exchanges
from scalec.runtime.comm import experts as layouts
from scalec.runtime.comm.experts import ExpertRows, Experts, Groups, Order
from scalec.runtime.debug.sanitize import require_determinism
from scalec.runtime.ops import grouped_linear as products
from scalec.runtime.ops import routed_rows, routing

TWO = Case(model="two", microbatches=2)
BOUNDED = Case(model="capacity")
RECOMPUTED = Case(model="two", recompute="full")
ONE = Case(model="one", dp=2, experts="dp")
SAME = Case(model="two", tp=2, experts="tp")


def wrong(case: Case, folder: Path) -> set[str]:
    """The parameters whose gradients are not plain torch's."""
    return wrong_gradients(first_step(case, harness.load_case(case, folder)), right_step(case))


@pytest.mark.parametrize("case", [TWO, BOUNDED, RECOMPUTED], ids=str)
def test_without_a_defect_they_are_right(case: Case, tmp_path: Path) -> None:
    assert wrong(case, tmp_path) == set()


def _for_programs(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Emitted programs import this one in place of the runtime's of that name."""
    monkeypatch.setattr(scalec.runtime, function.__name__.removeprefix("wrong_"), function)


# ---- rows that are not there


def test_memory_that_nothing_wrote_is_no_number_on_ranks() -> None:
    ((one, other),) = run_ranks(1, lambda: (torch.empty(3), torch.ones(2).new_empty(2, 2)))
    assert one.isnan().all()
    assert other.isnan().all()


def _to_first(case: Case) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Parameters by which all tokens choose the first expert, and a batch."""
    start = reference.initial(case.config)
    start |= {
        name: torch.zeros_like(value) for name, value in start.items() if name.endswith("router")
    }
    return start, [*harness.batches(case, 1)]


def test_row_53_an_expert_without_rows_leaves_its_gradient_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None, or no number (Megatron PR #3626, transformers#48205): groups without rows are
    skipped.
    """

    def of_weight(gradient: Tensor, x: Tensor, held: Groups) -> Tensor:
        made = products.of_weight(gradient, x, held)
        left = torch.empty_like(made)
        for expert, size in enumerate(held.sizes):
            left[expert] = made[expert] if size else left[expert]
        return left

    def wrong_grouped_linear(x: Tensor, weight: Tensor, held: Groups) -> Tensor:
        return grouped_linear(x, weight, held, products.PLAIN._replace(of_weight=of_weight))

    case = Case(model="one")
    start, batches = _to_first(case)
    (right,) = reference.run(case.config, case.training, start, batches, LR)
    _for_programs(monkeypatch, wrong_grouped_linear)
    (got,) = harness.run(case, harness.load_case(case, tmp_path), start, batches, LR)
    assert wrong_gradients(got, right) == {
        f"layers.{i}.{name}" for i in range(2) for name in ("w_gate", "w_up", "w_down")
    }


def test_row_53_a_rank_without_rows_skips_an_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for it (NeMo Automodel#935, DeepSpeed PR #8478)."""
    begin = exchanges._Way.begin

    def skipped(way: exchanges._Way, rows: Tensor, back: bool) -> None:
        faulthandler.disable()  # gloo may abort
        if len(rows):
            begin(way, rows, back)
        else:
            came = rows.new_zeros(
                sum(way.expert_rows.sent if back else way.expert_rows.received), rows.shape[-1]
            )
            way._under_way = Mock(), came, rows

    monkeypatch.setattr(exchanges._Way, "begin", skipped)
    start, batches = _to_first(ONE)
    with pytest.raises(pytest.fail.Exception):
        harness.run(ONE, harness.load_case(ONE, tmp_path), start, batches, LR)


def test_row_54_rows_after_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers were longer than their rows, and what followed was as memory had it (pytorch#154557,
    torchtitan#1237).  Here whoever takes rows knows how many there are."""

    def wrong_dispatch(x: Tensor, order: Order) -> Tensor:
        rows = routed_rows.dispatch(x, order)
        return torch.cat([rows, rows.new_empty(3, rows.shape[-1])])

    _for_programs(monkeypatch, wrong_dispatch)
    with pytest.raises(
        pytest.fail.Exception, match=r"grouped_linear: \d+ rows where \d+ were counted"
    ):
        wrong(TWO, tmp_path)


def test_row_76_what_was_dropped_counts_nothing_times_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate of zero times a row that nothing wrote: wrong only where memory held no number
    (transformers#48205).
    """

    def summed(rows: Tensor, gates: Tensor | None, order: Order) -> Tensor:
        if gates is None:
            return routed_rows.sum_rows(rows, gates, order)
        padded = torch.cat([rows, rows.new_empty(1, rows.shape[-1])])
        each = padded[order.rows] * gates.masked_fill(order.rows < 0, 0).unsqueeze(-1)
        return each.sum(1)

    def wrong_combine(rows: Tensor, gates: Tensor, order: Order) -> Tensor:
        return combine(rows, gates, order, routed_rows.PLAIN._replace(sum_rows=summed))

    _for_programs(monkeypatch, wrong_combine)
    assert wrong(TWO, tmp_path / "two") == set()  # no choice is dropped
    assert "layers.0.router" in wrong(BOUNDED, tmp_path / "bounded")


# ---- decisions


def _differently(
    chosen: Callable[..., tuple[Tensor, Tensor]],
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Every second call prefers the experts that the first likes least, as another rounding
    might.
    """
    calls = [0]

    def choose(logits: Tensor, bias: Tensor | None, how: routing.Choice) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        gates, ids = chosen(logits, bias, how)
        return (gates, ids) if calls[0] % 2 else (gates, logits.shape[-1] - 1 - ids)

    return choose


def test_row_58_backward_chooses_other_experts_than_forward_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recomputed was routed anew (NeMo Automodel PR #2635, #3325): decisions are kept,
    else this is seen.
    """

    def wrong_top_k(logits: Tensor, k: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return top_k(logits, k, *rest, **options, backend=backend)

    backend = routing.PLAIN._replace(choose_experts=_differently(routing.choose_experts))
    case = replace(RECOMPUTED, layers=1)
    _for_programs(monkeypatch, wrong_top_k)
    assert wrong(case, tmp_path / "kept") == set()
    for module in (routing, layouts):
        monkeypatch.setattr(module, "decide_once", lambda make: make())
    assert "layers.0.w_gate" in wrong(case, tmp_path / "anew")


def test_row_78_equal_scores_choose_the_higher_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel broke ties in its own way (NeMo Automodel#2635, #3140)."""
    monkeypatch.setattr(
        routing,
        "_best",
        lambda x, k: (
            x.flip(-1)
            .sort(dim=-1, descending=True, stable=True)
            .indices.neg()
            .add(x.shape[-1] - 1)[..., :k]
            .contiguous()
        ),
    )
    case = Case(model="two")
    assert wrong(case, tmp_path / "apart") == set()  # no two are equal
    start, batches = _to_first(case)
    (right,) = reference.run(case.config, case.training, start, batches, LR)
    (got,) = harness.run(case, harness.load_case(case, tmp_path / "equal"), start, batches, LR)
    assert "layers.0.w_gate" in wrong_gradients(got, right)


def test_row_79_scores_are_rounded_before_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sigmoid in bfloat16 makes scores equal that are not (Megatron#2765)."""

    def wrong_top_k(logits: Tensor, k: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return top_k(logits.bfloat16().to(logits.dtype), k, *rest, **options)

    _for_programs(monkeypatch, wrong_top_k)
    assert "layers.0.router" in wrong(Case(model="sigmoid"), tmp_path)


def test_row_75_gates_weigh_the_rows_of_other_choices_at_run_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dispatchers did not agree on the order of scores (Megatron#1603)."""

    def wrong_combine(rows: Tensor, gates: Tensor, order: Order) -> Tensor:
        return combine(rows, gates.flip(-1), order)

    _for_programs(monkeypatch, wrong_combine)
    assert "layers.0.w_down" in wrong(TWO, tmp_path)


def test_row_87_the_order_of_another_microbatch_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept beyond its microbatch (NeMo Automodel#3684, #3743); sizes fit, for there are
    as many rows.
    """
    orders: list[Order] = []

    def wrong_sort_by_expert(ids: Tensor, experts: Experts) -> Order:
        orders.append(sort_by_expert(ids, experts))
        # the order of the layer in the first microbatch
        return orders[len(orders) - 1 - 2 * (len(orders) > 2)]

    _for_programs(monkeypatch, wrong_sort_by_expert)
    assert wrong(replace(TWO, microbatches=1), tmp_path / "one") == set()
    assert "layers.0.w_gate" in wrong(TWO, tmp_path / "two")


# ---- ranks that disagree


def test_row_65_ranks_with_the_same_tokens_choose_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another rounding of logits, so that each makes rows that the other counts on: no
    thread found.
    """

    def wrong_top_k(logits: Tensor, k: int, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
        gates, ids = top_k(logits, k, *rest, **options)
        return gates, ids.roll(1, 0) if torch.distributed.get_rank() else ids

    _for_programs(monkeypatch, wrong_top_k)
    found = sanitizer(SAME, harness.load_case(SAME, tmp_path))
    assert "`ids` at" in found
    assert "is not the same over tp: rank 0 differs from rank 1" in found


def test_row_66_ranks_count_other_rows_than_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hang, or rows shifted by one: no thread found."""

    def wrong_exchange_counts(order: Order) -> ExpertRows:
        held = exchange_counts(order)
        if torch.distributed.get_rank():
            held.received[0] += 1
        return held

    _for_programs(monkeypatch, wrong_exchange_counts)
    found = sanitizer(ONE, harness.load_case(ONE, tmp_path))
    assert "rank 0 sends" in found
    assert "rows to rank 1, which takes" in found


# ---- sums


def _written_twice() -> None:
    require_determinism()
    order = sort_by_expert(torch.tensor([[0, 1], [1, 0]]), Experts(Mesh({}), 2))
    torch.zeros(2).put_(order.choices // 2, torch.arange(4.0))


def test_row_85_rows_lie_in_whatever_order_they_come() -> None:
    """A run is not the same twice (Megatron#2101, #7425).

    A sanitized one lets no op pass that has no order.
    """
    with pytest.raises(
        pytest.fail.Exception, match="put_ does not have a deterministic implementation"
    ):
        run_ranks(1, _written_twice)
