"""Gradients that are accumulated over microbatches, and what they are divided by: rows 1 to 5, 11
and 15; and what microbatches are given: rows 104 and 105.

The rows about pipelines are about how a schedule and accumulation share the division: with stages,
as the last tests show, it is done once too, in the seed of every microbatch's backward.
"""

import pytest

from helpers.planted_defects import Defect, parameters, results_of

GRADIENT = "f64[vocab@tp, hidden]{dp: P}"
SEED = "inv_num_tokens.1: f64[]{dp: R} = coerce(inv_num_tokens) <axes=[dp], from=I, to=R>"
BACKWARD = "(loss_sum * inv_num_tokens).backward()"

CARRIED = {
    "  loss.1: f64[]{dp: P},": f"""  acc: {GRADIENT} = zeros() !tiny.scale:1
  loss.1: f64[]{{dp: P}},""",
    "labels: i64[seq, batch@dp] = each labels.1)": f"labels: i64[seq, batch@dp] = each labels.1, "
    f"acc.1: {GRADIENT} = carry acc)",
}
"""The embedding's gradient goes from microbatch to microbatch, instead of being summed by the
region.
"""

OWN_COUNT = f"""own: i64[]{{dp: P}} = count_valid(labels) !tiny.scale:1
      own.1: i64[] = coerce(own) <axes=[dp], from=P, to=I> !tiny.scale:1
      own.2: f64[] = reciprocal(own.1) <dtype="f64"> !tiny.scale:1
      {SEED.replace("inv_num_tokens)", "own.2)")}"""


def every_gradient() -> set[str]:
    """What differs where every gradient is wrong, and loss and count are right."""
    return results_of(*parameters("llama"))


def test_row_01_accumulated_gradients_are_scaled_again_at_each_microbatch() -> None:
    """What had been summed was divided with each new microbatch, so that the first counted
    least (torchtitan#1733).
    """
    summed = f'd_wte: {GRADIENT} = vjp(d_x.7, tokens, wte.1) <of="embedding", wrt=[table]>'
    defect = Defect(
        "llama",
        ir=CARRIED
        | {
            summed: f"""{summed} !tiny.scale:5
      acc.2: {GRADIENT} = add(acc.1, d_wte) !tiny.scale:1
      acc.3: {GRADIENT} = divided(acc.2) <dims=[microbatches]>""",
            "sum d_wte,": "last acc.3,",
        },
        text={BACKWARD: f"{BACKWARD}; [g.div_(2) for g in state.gradients().values()]"},
    )
    assert defect.values() == results_of("wte")
    assert "`[g.div_(2) for g in state.gradients().values()]` does nothing" in defect.emission()


def test_row_02_gradients_are_not_divided_by_the_count() -> None:
    """The loss was divided by the valid tokens of the step, its gradients were not
    (torchtitan#2972).
    """
    undivided = {
        SEED: "one: f64[] = one(inv_num_tokens) !tiny.scale:1"
        f" {SEED.replace('inv_num_tokens)', 'one)')}"
    }
    defect = Defect("llama", ir=undivided, text={BACKWARD: "loss_sum.backward()"})
    assert defect.values() == every_gradient()
    assert "nothing in the IR does `loss_sum.backward()`" in defect.emission()


def test_row_03_microbatches_are_summed_as_if_they_were_averaged() -> None:
    """Each microbatch divided by its own count and the sums were added: a norm too large by their
    number (DeepSpeed#7773).  Every type fits."""
    defect = Defect(
        "llama",
        ir={SEED: OWN_COUNT},
        text={BACKWARD: "(loss_sum / count_valid(labels)).backward()"},
    )
    assert defect.types() == ""
    assert defect.values() == every_gradient()
    assert defect.values(labels="all") == every_gradient()
    assert "nothing in the IR does `count_valid(labels)`" in defect.emission()


def test_row_04_only_the_last_microbatch_is_kept() -> None:
    """Gradients were set to None between microbatches; the loss looks fine (Automodel PR #3530).

    Every type fits.
    """
    defect = Defect(
        "llama",
        ir=CARRIED | {"sum d_wte,": "last d_wte,"},
        text={BACKWARD: f"state.zero(); {BACKWARD}"},
    )
    assert defect.types() == ""
    assert defect.values() == results_of("wte")
    assert "nothing in the IR does `state.zero()`" in defect.emission()


def test_row_05_gradients_are_divided_by_the_number_of_microbatches_too() -> None:
    """The loss was a mean already, and the schedule divided once more (AReaL PR #1273)."""
    again = {
        SEED: "less: f64[] = divided(inv_num_tokens) <dims=[microbatches]> !tiny.scale:1 "
        + SEED.replace("inv_num_tokens)", "less)")
    }
    defect = Defect(
        "llama", ir=again, text={BACKWARD: "(loss_sum * inv_num_tokens / 2).backward()"}
    )
    assert defect.values() == every_gradient()
    assert "nothing in the IR does `loss_sum * inv_num_tokens / 2`" in defect.emission()


@pytest.mark.parametrize("plan", ["two tensor axes", "adamw"])
def test_row_11_one_parameters_gradient_is_twice_as_large(plan: str) -> None:
    """Experts' gradients were doubled by expert parallelism, and Adam hid it (pytorch#160285,
    DeepSpeed PR #5259, megablocks#20).  Here a gradient that one axis shards; every type fits.
    `test_runs` shows what AdamW hides."""
    own = "ffn@ep, hidden]{tp: P}" if plan == "two tensor axes" else "ffn@tp, hidden]{dp: P}"
    made = f"d_w_up: f64[{own} = contract(d__y.1, m.3) <over=[seq, batch]>"
    twice = f"{made} !tiny.scale:12 d_w_up.9: f64[{own} = add(d_w_up, d_w_up)"
    defect = Defect(plan, ir={made: twice, "stack d_w_up,": "stack d_w_up.9,"})
    assert defect.types() == ""
    assert defect.values() == results_of("w_up")


def of_microbatches(plan: str, name: str, type: str, fault: str) -> dict[str, str]:
    """An input of the step, which microbatches have after a fault."""
    each = f"{name}: {type.replace('microbatches, ', '')} = each {name}."
    number = "2" if name == "draws" else "1"
    made = f"{name}.9: {type} = {fault}({name}.{number})"
    return {
        "  loss.1: f64[]{dp: P},": f"  {made} !tiny.scale:1\n  loss.1: f64[]{{dp: P}},",
        f"{each}{number}": f"{each}9",
    }


def test_row_104_every_microbatch_drops_what_the_first_does() -> None:
    """Generators began anew: no thread found.  Every type fits."""
    defect = Defect(
        "dropout",
        ir=of_microbatches("dropout", "draws", "i64[microbatches, batch@dp]", "alike"),
        text={"model(tokens, labels, draws)": "model(tokens, labels, batch.draws[0])"},
    )
    assert {"loss", "gradient of wte"} <= defect.values()
    assert "gives the model other inputs" in defect.emission()


@pytest.mark.parametrize(
    ("plan", "given"),
    [("llama", "model(tokens, labels)"), ("stages", "PIPELINE.run(model, batch,")],
)
def test_row_105_labels_are_those_of_another_microbatch(plan: str, given: str) -> None:
    """Losses compared outputs of one batch with labels of the next (DeepSpeed#5729)."""
    others = "Batch(batch.tokens, batch.labels.roll(1, 0)),"
    rolled = given.replace("labels)", "labels.roll(1, 1))").replace("batch,", others)
    assert Defect(plan, text={given: rolled}).emission()
    moved = of_microbatches("llama", "labels", "i64[microbatches, seq, batch@dp]", "behind")
    assert {"loss", "gradient of wte"} <= Defect("llama", ir=moved).values()


def test_row_15_a_mean_of_microbatches_means() -> None:
    """Each microbatch was divided by its own tokens and the mean was taken over microbatches: right
    only where all have as many (transformers PR #34191, #35203, PR #40610; trl#2175; NeMo
    Speech#8343).  Equal counts hide it."""
    mean = (
        "own.3: f64[] = divided(own.2) <dims=[microbatches]> !tiny.scale:1"
        f" {SEED.replace('inv_num_tokens)', 'own.3)')}"
    )
    defect = Defect(
        "llama",
        ir={SEED: OWN_COUNT.replace(SEED.replace("inv_num_tokens)", "own.2)"), mean)},
        text={BACKWARD: "(loss_sum / count_valid(labels) / 2).backward()"},
    )
    assert defect.values(labels="all") == set()
    assert defect.values() == every_gradient()
    assert "nothing in the IR does `count_valid(labels)`" in defect.emission()


def test_row_15_a_mean_of_ranks_means() -> None:
    """Each data-parallel rank divided by its own tokens, and gradients were averaged (prime-rl PR
    #1957).  Equal counts hide it."""
    own = """own: f64[]{dp: P} = reciprocal(num_tokens) <dtype="f64"> !tiny.scale:1"""
    mean = "inv_num_tokens.1: f64[]{dp: R} = divided(own) <axes=[dp]>"
    defect = Defect(
        "llama",
        ir={"  loss.1: f64[]{dp: P},": f"  {own} loss.1: f64[]{{dp: P}},", SEED: mean},
        text={
            "num_tokens = all_reduce_(count_valid(batch.labels), dp)": (
                "num_tokens = count_valid(batch.labels)"
            )
        },
    )
    assert defect.values(labels="all") == set()
    assert defect.values() == every_gradient()
    assert "nothing in the IR does `num_tokens.clamp(min=1)`" in defect.emission()


def test_row_15_no_plan_can_average_by_ranks() -> None:
    """A count that is not added up is partial, so is what is made of it, and nothing takes that
    for whole.
    """
    own = {"reciprocal(num_tokens.1)": "reciprocal(num_tokens)"}
    assert "reciprocal takes a count that is reduced" in Defect("llama", ir=own).types()
    own |= {"inv_num_tokens: f64[] =": "inv_num_tokens: f64[]{dp: P} ="}
    assert "reciprocal takes a count that is reduced" in Defect("llama", ir=own).types()
    assert Defect("llama", ir=own).values() == every_gradient() | {"loss"}


def test_row_15_reciprocals_of_the_ranks_counts_are_added() -> None:
    """Of a pending count a pending reciprocal was made, as if that were linear."""
    added = """own: f64[]{dp: P} = reciprocal(num_tokens) <dtype="f64"> !tiny.scale:1
  inv_num_tokens: f64[] = coerce(own) <axes=[dp], from=P, to=I>"""
    defect = Defect(
        "llama", ir={'inv_num_tokens: f64[] = reciprocal(num_tokens.1) <dtype="f64">': added}
    )
    assert "reciprocal takes a count that is reduced" in defect.types()
    assert defect.values() == every_gradient() | {"loss"}


# ---- with stages


@pytest.mark.parametrize(
    "given",
    [
        "inv_num_tokens / len(batch)",
        "torch.ones_like(inv_num_tokens)",
        "inv_num_tokens / all_reduce_(torch.ones_like(inv_num_tokens), pp)",
    ],
    ids=["row 1 and 5", "row 2", "by the ranks"],
)
def test_stages_are_given_the_share_and_nothing_else(given: str) -> None:
    """Schedules that divide by the number of microbatches, or leave it to the loss
    (torchtitan#1733, #2972).
    """
    run = "PIPELINE.run(model, batch, inv_num_tokens, mesh, flat_params)"
    assert Defect("stages", text={run: run.replace("inv_num_tokens", given)}).emission()


def test_stages_whose_microbatches_are_summed_as_if_they_were_averaged() -> None:
    """Row 3; every type fits."""
    defect = Defect("stages", ir={SEED: OWN_COUNT})
    assert defect.types() == ""
    assert {f"gradient of {name}" for name in parameters("stages")} <= defect.values()
