"""The gradient's norm, clipping by it, and the decision to update at all: rows 6 to 9, 29, 33
and 96.
"""

import pytest

from helpers.planted_defects import Defect, Edits, parameters

REDUCED = 'all_reduce_(sum_squares(gradients["matrices"]), tp)'
WHOLE = "grad_norm_sq.2: f64[] = sum_squares(g_vectors.1)"
NORM = "grad_norm: f64[] = grad_norm(grad_norm_sq.1, grad_norm_sq.2)"
CLIP = "scale: f64[] = clip_scale(grad_norm)"
SKIP = "update(g_vectors.1, scale, num_tokens.2,"


def updated(*names: str) -> set[str]:
    """The new values of some parameters, by default of all."""
    return {f"updated {name}" for name in names or parameters("clipped")}


def test_row_06_clipped_by_the_norm_of_a_part() -> None:
    """Each pipeline stage clipped by the norm of its own parameters (torchtitan#596, PR #649).
    Here a bucket: the norm that is reported is right, and every type fits."""
    own = "own: f64[] = grad_norm(grad_norm_sq.2) !tiny.scale:1"
    own += f" part: f64[] = clip_scale(own) <max=0.1> !tiny.scale:1 {CLIP}"
    defect = Defect(
        "clipped",
        ir={CLIP: own, "update(g_vectors.1, scale,": "update(g_vectors.1, part,"},
        text={
            "scale=clip_scale(grad_norm, 0.1)": (
                'scale=clip_scale(sum_squares(gradients["vectors"]).sqrt(), 0.1)'
            )
        },
    )
    assert defect.types() == ""
    assert defect.values() == updated("norm1", "norm2", "norm")
    assert "nothing in the IR does `sum_squares(gradients['vectors'])`" in defect.emission()


def test_row_06_each_stage_clips_by_the_norm_of_its_own() -> None:
    """As it was there, the sum over the stages left out for some of the parameters."""
    defect = Defect(
        "stages",
        ir={
            "grad_norm(grad_norm_sq.1, grad_norm_sq.5,": "grad_norm(grad_norm_sq.1, grad_norm_sq.2,"
        },
        text={
            'all_reduce_(sum_squares(*gradients["vectors"]), pp)': (
                'sum_squares(*gradients["vectors"])'
            )
        },
    )
    assert "grad_norm is not linear in what is partial on pp" in defect.types()
    assert defect.values() == {"norm", *updated(*parameters("stages"))}
    assert (
        "nothing in the IR does `all_reduce_(sum_squares(gradients['matrices'], once=pp), pp_tp) + "
        in defect.emission()
    )


def test_row_07_the_norm_of_shards_is_not_added_over_tensor_parallel_ranks() -> None:
    """Clipping under tensor parallelism took each rank's shards for the whole (torchtune#2420)."""
    defect = Defect(
        "clipped",
        ir={NORM: NORM.replace("grad_norm_sq.1", "grad_norm_sq")},
        text={REDUCED: 'sum_squares(gradients["matrices"])'},
    )
    assert "grad_norm is not linear in what is partial on tp" in defect.types()
    assert defect.values() == {"norm", *updated()}
    assert (
        "nothing in the IR does `sum_squares(gradients['matrices']) +"
        " sum_squares(gradients['vectors'])`" in defect.emission()
    )


def test_row_08_weights_on_every_rank_are_counted_by_every_rank() -> None:
    """Squares of replicated weights were added over tensor parallelism too: a norm 1.36 to 1.52
    times too large (ROCm/TransformerEngine#715)."""
    counted = """grad_norm_sq.3: f64[]{tp: P} = sum_squares(g_vectors.1) !tiny.scale:1
  grad_norm_sq.2: f64[] = coerce(grad_norm_sq.3) <axes=[tp], from=P, to=I>"""
    defect = Defect(
        "clipped",
        ir={WHOLE: counted},
        text={
            'sum_squares(gradients["vectors"])': (
                'all_reduce_(sum_squares(gradients["vectors"]), tp)'
            )
        },
    )
    assert "grad_norm_sq.3 is" in defect.types()
    assert defect.values() == {"norm", *updated()}
    assert (
        "nothing in the IR does `all_reduce_(sum_squares(gradients['vectors']), tp)`"
        in defect.emission()
    )


def test_row_08_no_norm_takes_whole_and_sharded_gradients_together() -> None:
    """The sum of squares of both, added over the axis that shards one of them."""
    both = {
        "sum_squares(g_matrices.1)": "sum_squares(g_matrices.1, g_vectors.1)",
        NORM: NORM.replace(", grad_norm_sq.2", ""),
    }
    assert (
        "sum_squares needs its operands sharded alike on tp" in Defect("clipped", ir=both).types()
    )
    assert Defect("clipped", ir=both).values() == {"norm", *updated()}


def test_row_09_a_group_of_parameters_is_left_out_of_the_norm() -> None:
    """The norm omitted the experts (Megatron PR #5916).  Here a bucket; every type fits."""
    defect = Defect(
        "clipped",
        ir={NORM: NORM.replace("grad_norm_sq.1, ", "")},
        text={
            f'({REDUCED} + sum_squares(gradients["vectors"]))': 'sum_squares(gradients["vectors"])'
        },
    )
    assert defect.types() == ""
    assert defect.values() == {"norm", *updated()}
    assert "nothing in the IR does `sum_squares(gradients['vectors']).sqrt()`" in defect.emission()


def test_row_29_every_rank_clips_by_its_own_norm() -> None:
    """Without a group for the reduction each rank took the norm of its shards, and copies of one
    weight parted (RLinf PR #1542).  The norm that is reported is right."""
    clip = CLIP.replace("clip_scale(grad_norm", "clip_scale(own")
    own = f"own: f64[]{{tp: P}} = grad_norm(grad_norm_sq, grad_norm_sq.2) !tiny.scale:1 {clip}"
    local = '(sum_squares(gradients["matrices"]) + sum_squares(gradients["vectors"]))'
    defect = Defect(
        "clipped",
        ir={CLIP: own},
        text={"clip_scale(grad_norm, 0.1)": f"clip_scale({local}.sqrt(), 0.1)"},
    )
    assert "grad_norm is not linear in what is partial on tp" in defect.types()
    assert defect.values() == updated()
    assert "nothing in the IR does `sum_squares(gradients['matrices'])`" in defect.emission()


def test_row_29_the_norm_of_shared_gradients_leaves_out_an_axis() -> None:
    """As above, where each rank of a data axis has a part of the sums: it clips by the norm of
    its parts.
    """
    reduced = "grad_norm_sq.1: f64[] = coerce(grad_norm_sq) <axes=[dp, tp], from=P, to=I>"
    defect = Defect(
        "shared inside, copied outside",
        ir={reduced: reduced.replace("f64[]", "f64[]{dp: P}").replace("dp, tp", "tp")},
        text={'mesh.axis("dp", "tp")': 'mesh.axis("tp")'},
    )
    assert "grad_norm" in defect.types()
    assert {"norm"} < defect.values()
    assert (
        "nothing in the IR does `all_reduce_(sum_squares(gradients['matrices']), dp_tp)`"
        in defect.emission()
    )


def test_row_33_each_rank_decides_by_itself_whether_to_update() -> None:
    """Some ranks skipped a step and others did not (ColossalAI PR #1175, WeatherGenerator PR
    #2718).  Here ranks without a label of their own; none of them looks whether the step is finite.
    """
    defect = Defect(
        "clipped",
        ir={SKIP: SKIP.replace("num_tokens.2", "num_tokens")},
        text={"skip=num_tokens == 0": "skip=count_valid(batch.labels) == 0"},
    )
    assert "update takes gradients that are reduced" in defect.types()
    assert defect.values(labels="silent rank") == updated("norm1", "norm2", "norm")
    assert defect.values(labels="all") == updated("norm1", "norm2", "norm")
    assert "nothing in the IR does `count_valid(batch.labels)`" in defect.emission()


@pytest.mark.parametrize(
    ("ir", "text"),
    [
        (
            {
                "clip_scale(grad_norm)": "clip_scale(grad_norm.9)",
                "  scale: f32[] =": (
                    "  grad_norm.9: f32[] = grad_norm(grad_norm_sq.1, grad_norm_sq.2)"
                    " !tiny.scale:1\n"
                    "  scale: f32[] ="
                ),
            },
            {".sqrt() / scale\n": ".sqrt()\n"},
        ),
        (
            {"update(g_matrices.1, scale.1,": "update(g_matrices.1, scale,"},
            {"0.5) / scale": "0.5)"},
        ),
    ],
    ids=["norm", "gradients"],
)
def test_row_96_gradients_are_clipped_with_their_loss_scale(ir: Edits, text: Edits) -> None:
    """Before it was taken out of them, or instead (lightning#9599, returnn#1590).

    Every type fits.
    """
    defect = Defect("fp16", ir=ir, text=text)
    assert defect.types() == ""
    assert "updated wte" in defect.values()
    assert not {"loss", "norm", "gradient of wte"} & defect.values()
    assert "nothing in the IR does" in defect.emission()
