"""A program of experts whose kernels all run, two steps on two ranks: what comes is that of one process in float64."""

from helpers.kernels.interpreted_program import outcome

ROUTES = {
    "top_k_forward",
    "top_k_backward",
    "router_sums_kernel",
    "router_sums_backward",
    "router_z_forward",
    "router_z_backward",
    "sort_count_kernel",
    "sort_place_kernel",
    "grouped_places_kernel",
    "regrouped_kernel",
    "taken_kernel",
    "summed_kernel",
    "spread_kernel",
    "grouped_rows_kernel",
    "grouped_weight_kernel",
}
"""The kernels of a route between ranks with several experts each, and of its losses."""


def test_a_program_of_experts_with_kernels_is_right() -> None:
    started, failure = outcome()
    assert not failure, failure
    assert {*started} >= ROUTES
