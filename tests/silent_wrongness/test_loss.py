"""The loss and what it is divided by, over axes that split batch, sequence and vocabulary: rows 13,
14, 16, 24, 25, 31.

Attention over a sharded sequence waits; the rest of a model over it does not.
"""

import pytest

from helpers.planted_defects import LABELS, TEXTS, Defect, parameters, results_of
from helpers.programs import get_error_code

SEQUENCE = "batch and sequence"  # dp 2 × cp 2
SHARE = 'inv_num_tokens: f64[] = reciprocal(num_tokens.1) <dtype="f64">'
AXES = 'dp_cp = mesh.axis("dp", "cp")'
COUNTED = "all_reduce_(count_valid(batch.labels), dp_cp)"


def everything() -> set[str]:
    """All results but the count."""
    return {"loss"} | results_of(*parameters(SEQUENCE))


def test_row_13_the_loss_is_divided_by_the_ranks_of_the_sequence_too() -> None:
    """Scaled by the size of context parallelism once more (Megatron#673)."""
    mean = SHARE.replace("inv_num_tokens", "mean")
    defect = Defect(
        SEQUENCE,
        ir={SHARE: f"{mean} !tiny.scale:1 inv_num_tokens: f64[] = divided(mean) <axes=[cp]>"},
        text={"num_tokens.clamp(min=1)": "(2 * num_tokens).clamp(min=1)"},
    )
    assert defect.values() == everything()
    assert "nothing in the IR does" in defect.emission()


def test_row_13_the_count_is_added_in_the_wrong_group() -> None:
    """Divided by the tokens of data parallelism, without context parallelism (Megatron#906)."""
    made = "num_tokens.1: i64[] = coerce(num_tokens) <axes=[dp, cp]"
    defect = Defect(
        SEQUENCE,
        ir={made: made.replace("i64[]", "i64[]{cp: P}").replace("dp, cp", "dp")},
        text={AXES: f'{AXES}; dp = mesh.axis("dp")', COUNTED: COUNTED.replace("dp_cp", "dp")},
    )
    assert "reciprocal takes a count that is reduced" in defect.types()
    assert defect.values() == {"count", *everything()}
    assert (
        "nothing in the IR does `all_reduce_(count_valid(batch.labels), dp)`" in defect.emission()
    )


def test_row_14_the_loss_that_is_shown_lacks_the_other_parts_of_the_sequence() -> None:
    """Only the loss in the log was wrong: half (torchtitan#3280, #3329)."""
    made = "loss.2: f64[] = coerce(loss.1) <axes=[dp, cp]"
    defect = Defect(
        SEQUENCE,
        ir={made: made.replace("f64[]", "f64[]{cp: P}").replace("dp, cp", "dp")},
        text={
            AXES: f'{AXES}; dp = mesh.axis("dp")',
            "all_reduce_(loss, dp_cp)": "all_reduce_(loss, dp)",
        },
    )
    assert "mul mixes partial and not on cp" in defect.types()
    assert defect.values() == {"loss"}
    assert "nothing in the IR does `all_reduce_(loss, dp)`" in defect.emission()


SECOND = (
    "d_sum_exp.2: f64[seq, batch@dp], d_label_logit.2: f64[seq, batch@dp] = vjp(inv_num_tokens.1,"
)


def test_row_16_a_second_loss_is_shown_and_not_learned_from() -> None:
    """An auxiliary loss was added to what is shown, and its gradient was discarded (Automodel#1408,
    PR #1412).  Every type fits."""
    dropped = (
        f"none: f64[]{{dp: R}} = zeros() !tiny.scale:5 {SECOND.replace('inv_num_tokens.1', 'none')}"
    )
    defect = Defect(
        "two losses", ir={SECOND: dropped}, text={"return first +": "return first.detach() +"}
    )
    assert defect.types() == ""
    assert defect.values() == results_of("a", "wte")
    assert "nothing in the IR does" in defect.emission()


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_row_16_a_second_loss_is_scaled_by_the_ranks(axis: str) -> None:
    """An auxiliary loss depended on how many ranks shared the work (Megatron PR #5047, #3768)."""
    less = f"less: f64[]{{dp: R}} = divided(inv_num_tokens.1) <axes=[{axis}]>"
    scaled = f"{less} !tiny.scale:5 {SECOND.replace('inv_num_tokens.1', 'less')}"
    defect = Defect(
        "two losses", ir={SECOND: scaled}, text={"return first +": "return first / 2 +"}
    )
    assert defect.values() == results_of("a", "wte")
    assert "nothing in the IR does" in defect.emission()


GATHERED = {
    "logits_max: f64[seq, batch@dp]{tp: M} = max_logit(_logits)": (
        "full: f64[seq, batch@dp, vocab]{tp: R} = "
        "coerce(_logits) <axes=[tp], from=S(vocab), to=R> !tiny.scale:12 "
        "logits_max: f64[seq, batch@dp]{tp: M} = max_logit(full)"
    ),
    "local_softmax_stats(_logits, logits_max.1, labels)": (
        "local_softmax_stats(full, logits_max.1, labels)"
    ),
}


def test_row_24_gathered_logits_in_a_vocabulary_parallel_loss() -> None:
    """Whole logits went into a loss that adds over ranks: log of the ranks too much (Megatron#7452,
    row 2).  `test_runs` shows the log."""
    wrong = "max_logit(all_gather(logits, self.tp, dim=2))"
    defect = Defect("llama", ir=GATHERED, text={"max_logit(logits)": wrong})
    assert "but max_logit makes" in defect.types()
    assert {"loss", "norm", "gradient of head"} < defect.values()
    assert "nothing in the IR does `all_gather(logits, self.tp, dim=2)`" in defect.emission()


SMOOTHED = "smoothing and z-loss"
PARTS = "local_softmax_stats(_logits, logits_max.1, labels)"
OWN_MEAN = {
    f"label_logit: f64[seq, batch@dp]{{tp: P}} = {PARTS} <smoothing=0.1>": (
        "hard: f64[seq, batch@dp]{tp: P} = "
        f"{PARTS}"
        " !tiny.scale:12 minus: f64[seq, batch@dp]{tp: P} = scale(hard) <by=-1.0> !tiny.scale:12"
        " z.9: f64[seq, batch@dp]"
        f"{{tp: P}}, soft: f64[seq, batch@dp]{{tp: P}} = {PARTS} <smoothing=0.1>"
    ),
    "label_logit.1: f64[seq, batch@dp] = coerce(label_logit) <axes=[tp], from=P, to=I>": (
        "hard.1: f64[seq, batch@dp] = "
        "coerce(hard) <axes=[tp], from=P, to=I> !tiny.scale:12 "
        "label_logit.1: f64[seq, batch@dp] = add(hard.1, soft, minus)"
    ),
}


def test_row_24_smoothed_labels_take_the_mean_of_a_ranks_own_classes() -> None:
    """What smoothing adds to the label's logit was not summed over ranks, so that their losses
    differed (Megatron#737, #7452, row 1)."""
    parts = "local_softmax_stats(logits, logits_max, labels, self.tp, classes=9, smoothing=0.1)"
    defect = Defect(SMOOTHED, ir=OWN_MEAN, text={parts: parts.replace("self.tp, ", "")})
    assert "add is not linear in what is partial on tp" in defect.types()
    assert defect.values() == {"loss"}
    assert (
        "nothing in the IR does `local_softmax_stats(logits, logits_max, labels, classes=9"
        in defect.emission()
    )


def test_row_24_the_gradient_of_smoothed_labels_is_that_of_others() -> None:
    """Backward gave each class another share than forward: one of this rank's classes
    (Megatron#7464).
    """
    shares = '<of="local_softmax_stats", wrt=[logits], grads=2, smoothing='
    defect = Defect(
        SMOOTHED, ir={f"{shares}0.1": f"{shares}0.2"}, text={"smoothing=0.1": "smoothing=0.2"}
    )
    assert defect.types() == ""
    assert defect.values() == results_of(*parameters(SMOOTHED))
    assert "nothing in the IR does `local_softmax_stats(" in defect.emission()


def test_row_25_a_vocabulary_that_the_axis_does_not_divide() -> None:
    """Training diverged (Megatron#1754).

    Such a plan is refused; one with padding gives it no probability.
    """
    assert get_error_code(TEXTS["vocabulary that does not divide"]) == "E0510"
    counted = Defect(
        "padded", ir={"dim vocab = 12 of 9": "dim vocab = 12"}, text={"classes=9": "classes=12"}
    )
    assert counted.types() == ""
    assert counted.values() >= {"loss"}
    assert "nothing in the IR does `max_logit(logits, self.tp, classes=12)`" in counted.emission()


@pytest.mark.sample(4)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    "plan", ["llama", SEQUENCE, "three axes", "two key/value heads on four ranks"]
)
def test_plans_are_right_whatever_has_labels(plan: str, labels: str) -> None:
    """Ranks with more labels, fewer or none, and a step with a single one: the rest of row 15,
    without a defect.
    """
    assert Defect(plan).values(labels) == set()
