"""A route of experts by kernels, on the meta device: which start, how often, and that backward
needs no others.
"""

from collections import Counter

import pytest
import torch

from helpers.kernels.compiled import recorded
from helpers.kernels.programs import pretended
from scalec.runtime import Experts, Mesh, all_to_all
from scalec.runtime.kernels import (
    Balance,
    Combine,
    Dispatch,
    Exchange,
    ExchangeBack,
    ExchangeCounts,
    GroupedLinear,
    Product,
    Products,
    RouterZ,
    SortByExpert,
    Tile,
    TopK,
)

TILE, CHUNK = Tile(rows=1, warps=4), Tile(rows=128, warps=4, columns=64)
BLOCK = Product(16, 16, 16, warps=4, stages=1)
WIDTH, COUNT = 32, 8


def _started(exchanged: bool) -> tuple[Counter[str], int]:
    """Kernels, and the rows of this rank's experts."""
    mesh = Mesh({"ep": 4}, "meta")
    experts = Experts(mesh, COUNT, "ep", tokens=["ep"] if exchanged else [])
    x = torch.empty(2, 6, WIDTH, device="meta", requires_grad=True)
    weight = torch.empty(experts.experts_per_rank, WIDTH, WIDTH, device="meta", requires_grad=True)
    with recorded() as launches:
        gates, ids = TopK({COUNT: TILE})(
            torch.empty(2, 6, COUNT, device="meta", requires_grad=True), 2
        )
        order = SortByExpert({COUNT: CHUNK})(ids, experts)
        held = ExchangeCounts({COUNT: CHUNK})(order)
        rows = Exchange({WIDTH: TILE})(Dispatch({WIDTH: TILE})(x, order), held)
        rows = ExchangeBack({WIDTH: TILE})(
            GroupedLinear({WIDTH: Products(BLOCK, BLOCK)})(rows, weight, held), held
        )
        out = Combine({WIDTH: TILE})(rows, gates, order)
        torch.autograd.backward([out], [torch.empty_like(out)])
    assert out.shape == x.shape
    assert x.grad is not None
    assert weight.grad is not None
    return Counter(launch.kernel.__name__ for launch in launches), held.total


def test_a_route_starts_each_kernel_once_forward_and_once_backward() -> None:
    expected = Counter(
        {
            "top_k_forward": 1,
            "top_k_backward": 1,
            "sort_count_kernel": 1,
            "sort_place_kernel": 1,
            "dispatch_kernel": 1,
            "combine_kernel": 2,
            "spread_kernel": 1,
            "group_rows_kernel": 2,
            "group_weight_kernel": 1,
        }
    )
    moved = Counter({"group_places_kernel": 1, "regroup_kernel": 4})
    with pretended(4, 1):
        assert _started(exchanged=True) == (expected + moved, 24)
        assert _started(exchanged=False) == (expected, 6)


def test_padded_rows_are_multiplied_and_exchanged_by_torch() -> None:
    """Each expert has 5 rows of each of 4 ranks: the sizes of all is known without what is
    chosen.
    """
    with pretended(4, 1):
        mesh = Mesh({"ep": 4}, "meta")
        x = torch.empty(2, 6, WIDTH, device="meta", requires_grad=True)
        weight = torch.empty(2, WIDTH, WIDTH, device="meta", requires_grad=True)
        with recorded() as launches:
            ids = torch.empty(2, 6, 2, device="meta", dtype=torch.int64)
            order = SortByExpert({COUNT: CHUNK})(
                ids, Experts(mesh, COUNT, "ep", tokens=["ep"]), padded=5
            )
            rows = all_to_all(
                Dispatch({WIDTH: TILE})(x, order), mesh.axis("ep"), dim_from=1, dim_to=0
            )
            assert rows.shape == (2, 20, WIDTH)
            rows = GroupedLinear({WIDTH: Products(BLOCK, BLOCK)})(rows, weight)
            back = all_to_all(rows, mesh.axis("ep"), dim_from=0, dim_to=1)
            Combine({WIDTH: TILE})(
                back, torch.empty(2, 6, 2, device="meta"), order
            ).sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    names = Counter(launch.kernel.__name__ for launch in launches)
    kernels = ("sort_count_kernel", "sort_place_kernel", "dispatch_kernel", "spread_kernel")
    assert names == Counter(kernels) + Counter(combine_kernel=2)


@pytest.mark.gpu
def test_a_route_waits_for_the_gpu_once() -> None:
    """To read how many rows each expert has; nothing else waits, forward or backward, once
    kernels are compiled.
    """
    experts, block = Experts(Mesh({}, "cuda"), COUNT), Product(16, 16, 16, warps=4, stages=1)
    x = torch.randn(64, WIDTH, device="cuda", requires_grad=True)
    weight = torch.randn(COUNT, WIDTH, WIDTH, device="cuda", requires_grad=True)
    router = torch.randn(COUNT, WIDTH, device="cuda", requires_grad=True)

    def route() -> None:
        logits = (x @ router.mT).view(2, 32, COUNT)
        gates, ids = TopK({COUNT: TILE})(logits, 2)
        losses = Balance({COUNT: TILE})(logits, ids, 0.01) + RouterZ({COUNT: TILE})(logits, 0.001)
        order = SortByExpert({COUNT: CHUNK})(ids, experts)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        assert order.total == 128
        torch.cuda.set_sync_debug_mode(before)
        rows = GroupedLinear({WIDTH: Products(block, block)})(
            Dispatch({WIDTH: TILE})(x, order), weight, order
        )
        (Combine({WIDTH: TILE})(rows, gates, order).sum() + losses).backward()

    route()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        route()
    finally:
        torch.cuda.set_sync_debug_mode("default")
