"""A program of experts whose kernels all run, two steps on two ranks: what comes is that of one
process in float64.
"""

import pytest

from helpers.kernels.interpreted_program import outcome

ROUTES = {
    "top_k_forward",
    "top_k_backward",
    "router_sums_kernel",
    "router_sums_backward",
    "sort_count_kernel",
    "sort_place_kernel",
    "dispatch_kernel",
    "combine_kernel",
    "spread_kernel",
}
"""The kernels of a route between ranks, and of its balance."""
RAGGED = {
    "router_z_forward",
    "router_z_backward",
    "group_places_kernel",
    "regroup_kernel",
    "group_rows_kernel",
    "group_weight_kernel",
}
"""Those where experts, of which a rank has several, have unequal numbers of rows; and of a
second loss.
"""


@pytest.mark.long
@pytest.mark.parametrize(("case", "others"), [("ragged", RAGGED), ("padded", set[str]())])
def test_a_program_of_experts_with_kernels_is_right(case: str, others: set[str]) -> None:
    started, failure = outcome(case)
    assert not failure, failure
    assert {*started} >= ROUTES | others
