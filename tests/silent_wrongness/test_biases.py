"""Biases of routers that train and are wrong: rows 19, 57 and 59."""

import pytest

from helpers.planted_defects import Defect

ADDED = "load.2: i64[all_layers, scored]{dp: P, ep: P} = add_load(load.1, ids)"
MOVED = 'state.balance("layers.*.router_bias", load, rate=0.5, skip=num_tokens == 0, finite=finite)'
OF_LOAD = {"load 0", "updated router_bias"}


def test_row_19_a_layer_counts_its_load_twice() -> None:
    """Where layers are recomputed, a count that was a side effect went up again (NeMo Automodel
    PR #3247).
    """
    other = ADDED.replace("load.2", "twice")
    again = ADDED.replace("load.1", "twice")
    defect = Defect(
        "biased",
        ir={ADDED: f"{other} !tiny.scale:15\n{again}"},
        text={"load += load_sum": ADD_TWICE},
    )
    assert defect.types() == ""
    assert defect.values() == OF_LOAD
    assert "nothing in the IR does `load_sum + load_sum`" in defect.emission()


ADD_TWICE = "load += load_sum + load_sum"

WRONG = {
    "evaluation": (
        "loss=loss, tokens=num_tokens)",
        "loss=loss, tokens=num_tokens, loads=(no_load(num_tokens, 2, 4),))",
    ),
    "later layers": (MOVED, MOVED.replace("*", "0")),
    "no layer": (MOVED, ""),
    "a rank's own load": (
        "    load = all_reduce_(load, dp_ep)  # tokens that chose each expert\n",
        "",
    ),
    "steps without labels": (MOVED, MOVED.replace("num_tokens == 0", "num_tokens < 0")),
}


@pytest.mark.parametrize("where", WRONG)
def test_row_57_biases_are_moved_by_another_load(where: str) -> None:
    """By evaluation, by a rank's part, or not in later layers (torchtitan PR #1593, #4148,
    #3686).
    """
    right, wrong = WRONG[where]
    assert Defect("biased", text={right: wrong}).emission()


def test_row_57_a_load_is_that_of_some_ranks() -> None:
    whole = "load.5: i64[all_layers, scored] = coerce(load.4) <axes=[dp, ep], from=P, to=I>"
    part = whole.replace("[dp, ep]", "[dp]")
    assert "ep" in Defect("biased", ir={whole: part}).types()


def test_row_59_a_bias_is_in_the_gate() -> None:
    """It is to choose, and not to weigh; many re-implementations add it to the scores that
    become gates.
    """
    line = "bias=self.router_bias)\n"
    defect = Defect("biased", text={line: f"{line}        gates = gates + self.router_bias[ids]\n"})
    assert "nothing in the IR does" in defect.emission()


def test_row_59_a_choice_is_made_without_the_bias() -> None:
    defect = Defect(
        "biased",
        ir={"top(_logits, router_bias.1)": "top(_logits)"},
        text={", bias=self.router_bias": ""},
    )
    assert defect.types() == ""
    assert defect.values() >= OF_LOAD | {"loss"}
    assert "nothing in the IR does `top_k(" in defect.emission()
