"""The read-back refuses programs that move the buckets of turns in any other way than the IR."""

import ast

import pytest

from helpers.readback_plans import compiled, with_imports
from scalec.compiler.emit.readback import check

REDUCED = "            x = reduce_grads_in_backward(x, layer_dp_split_tp, scatter=self.dp, each=True)\n"
REDUCED_2 = "            x = reduce_grads_in_backward(x, layer_dp_split_tp_2, scatter=self.dp, each=True)\n"
REDUCED_3 = "            x = reduce_grads_in_backward(x, layer_dp_tp, scatter=self.dp, add=self.tp, each=True)\n"
GATHERED = "            x = unshard(x, layer_dp_split_tp, self.dp)\n"
GATHERED_2 = "            x = unshard(x, layer_dp_split_tp_2, self.dp)\n"
TURN = "            x = layer(x, self.rotary)\n"
FREED = "            x = reshard(x, layer_dp_split_tp, self.dp)\n"
FREED_2 = "            x = reshard(x, layer_dp_split_tp_2, self.dp)\n"
AWAITED = "            x = wait_for_unshard(x, layer_dp_split_tp)\n"
AWAITED_2 = "            x = wait_for_unshard(x, layer_dp_split_tp_2)\n"
EACH = "    unshard_ahead(dp, flat_params['layers_dp_split_tp_2'], flat_params['layers_dp_split_tp'])\n"
WHOLE = "    all_gather_(weights['dp_split_tp'], dp)\n"
LOSS_SUM = "    loss = all_reduce_(loss, dp)"

LAYERS_OF_STAGE = {
    "a reduction is left out": ("zero 3", REDUCED, ""),
    "a reduction twice": ("zero 3", REDUCED, REDUCED * 2),
    "the reduction of another bucket": ("zero 3", REDUCED, REDUCED_2),
    "reductions in another order": ("zero 3", REDUCED_2 + REDUCED, REDUCED + REDUCED_2),
    "a reduction over another axis": ("zero 3", REDUCED, REDUCED.replace("self.dp", "self.tp")),
    "a sum in place of a part": ("zero 3", REDUCED, REDUCED.replace("scatter", "add")),
    "part and sum exchanged": ("zero 3", "scatter=self.dp, add=self.tp", "scatter=self.tp, add=self.dp"),
    "a part without its sum": ("zero 3", ", add=self.tp", ""),
    "a sum without its part": ("zero 3", "scatter=self.dp, add=self.tp", "add=self.tp"),
    "a part that is summed over another axis": ("zero 1, hybrid", "add=self.replica", "add=self.tp"),
    "a reduction once in a step": ("zero 3", REDUCED, REDUCED.replace(", each=True", "")),
    "a reduction in each microbatch": ("zero 1", "split_tp, scatter=self.dp)", "split_tp, scatter=self.dp, each=True)"),
    "a reduction after the turn": ("zero 3", REDUCED + REDUCED_3, REDUCED_3, TURN, TURN + REDUCED),
    "a reduction before the loop": ("zero 3", REDUCED, "", "        for layer,", REDUCED[4:] + "        for layer,"),
    "a reduction of what does not go on": ("zero 3", REDUCED, REDUCED.replace("x =", "y =")),
    "a reduction beside the carried": ("zero 3, two carried", REDUCED, REDUCED.replace("x", "y")),
    "a reduction in the state's dtype": ("fp16, zero 3", "each=True, dtype=torch.bfloat16)", "each=True)"),
    "a reduction in another dtype": (
        "fp16, zero 1",
        "layer_dp_split_tp, scatter=self.dp, dtype=torch.bfloat16)",
        "layer_dp_split_tp, scatter=self.dp, dtype=torch.float16)",
    ),
    "a reduction in a dtype of its own": ("zero 3", "each=True)", "each=True, dtype=torch.bfloat16)"),
    "the step reduces again": (
        "zero 1",
        "    grad_norm_sq = ",
        "    gradients['layers_dp_split_tp'] = reduce_scatter_(gradients['layers_dp_split_tp'], dp)\n"
        "    grad_norm_sq = ",
    ),
    "a gather is left out": ("zero 3", GATHERED, ""),
    "a gather twice": ("zero 3", GATHERED, GATHERED * 2),
    "a gather of another bucket": ("zero 3", GATHERED, GATHERED_2),
    "gathers in another order": ("zero 3", GATHERED_2 + GATHERED, GATHERED + GATHERED_2),
    "a gather over another axis": ("zero 3", GATHERED, GATHERED.replace("self.dp", "self.tp")),
    "a gather before a reduction": ("zero 3", REDUCED_3 + GATHERED_2, GATHERED_2 + REDUCED_3),
    "a gather after the turn": ("zero 3", GATHERED, "", TURN, TURN + GATHERED),
    "a gather that nothing began": ("zero 3", GATHERED, AWAITED),
    "weights that stay": ("zero 3", FREED, ""),
    "weights freed twice": ("zero 3", FREED, FREED * 2),
    "another bucket freed": ("zero 3", FREED, FREED_2),
    "weights freed in another order": ("zero 3", FREED + FREED_2, FREED_2 + FREED),
    "weights freed over another axis": ("zero 3", FREED, FREED.replace("self.dp", "self.tp")),
    "weights freed before the turn": ("zero 3", FREED, "", TURN, FREED + TURN),
    "weights freed after the loop": ("zero 3", FREED, "", "        n = rms_norm", FREED[4:] + "        n = rms_norm"),
    "a keyword by place": ("zero 3", REDUCED, REDUCED.replace("scatter=", "")),
    "another function": ("zero 3", FREED, FREED.replace("reshard", "max_logit")),
    "buckets zipped otherwise": (
        "zero 3",
        "flat_params['layers_dp_tp'], flat_params['layers_dp_split_tp'],",
        "flat_params['layers_dp_split_tp'], flat_params['layers_dp_tp'],",
    ),
    "a bucket twice in a loop": (
        "zero 3",
        "flat_params['layers_dp_split_tp_2'],",
        "flat_params['layers_dp_split_tp'],",
    ),
    "a bucket more in a loop": (
        "zero 1",
        "layer_dp_split_tp_2 in zip(",
        "layer_dp_split_tp_2, more in zip(",
        ", strict=True)",
        ", flat_params['layers_dp_split_tp'], strict=True)",
    ),
    "what is no bucket in a loop": (
        "zero 1",
        "layer_dp_split_tp_2 in zip(",
        "layer_dp_split_tp_2, more in zip(",
        ", strict=True)",
        ", self.rotary, strict=True)",
    ),
    "all turns for those inside": (
        "zero 3, nested",
        "block(x, draws, layers_dp_tp,",
        "block(x, draws, flat_params['blocks_layers_dp_tp'],",
    ),
    "as many as there are": ("zero 3", ", strict=True)", ")"),
    "the outer turns' buffers": ("zero 3, nested", "block(x, draws, layers_dp_tp,", "block(x, draws, block_dp_tp,"),
    "another bucket's buffers inside": (
        "zero 3, nested",
        "layers_dp_tp, layers_dp_split_tp, self.rotary",
        "layers_dp_split_tp, layers_dp_tp, self.rotary",
    ),
    "no wait": ("zero 1", AWAITED, ""),
    "a wait twice": ("zero 1", AWAITED, AWAITED * 2),
    "a wait for another bucket": ("zero 1", AWAITED, AWAITED_2),
    "a wait after the turn": ("zero 1", AWAITED, "", TURN, TURN + AWAITED),
    "a wait for nothing": ("zero 0", TURN, AWAITED + TURN),
    "a gather for a wait": ("zero 1", AWAITED, GATHERED),
    "no gather of all turns": ("zero 1", EACH, ""),
    "a gather of all turns twice": ("zero 1", EACH, EACH * 2),
    "all turns gathered over another axis": ("zero 1", EACH, EACH.replace("(dp", "(dp_tp")),
    "buckets gathered in another order": (
        "zero 1",
        EACH,
        "    unshard_ahead(dp, flat_params['layers_dp_split_tp'], flat_params['layers_dp_split_tp_2'])\n",
    ),
    "buckets gathered one after the other": (
        "zero 1",
        EACH,
        "    unshard_ahead(dp, flat_params['layers_dp_split_tp_2'])\n"
        "    unshard_ahead(dp, flat_params['layers_dp_split_tp'])\n",
    ),
    "a bucket that is not gathered": ("zero 1", EACH, EACH.replace(", flat_params['layers_dp_split_tp'])", ")")),
    "all turns gathered first": (
        "zero 1",
        f"    flat_params = state.flat_params(len(batch))\n{EACH}",
        "",
        "    dp_tp = mesh.axis('dp', 'tp')\n",
        f"    dp_tp = mesh.axis('dp', 'tp')\n    flat_params = state.flat_params(len(batch))\n{EACH}",
    ),
    "all turns gathered after the microbatches": ("zero 1", EACH, "", LOSS_SUM, EACH + LOSS_SUM),
    "whole weights gathered after the microbatches": ("zero 3", WHOLE, "", LOSS_SUM, WHOLE + LOSS_SUM),
    "one microbatch": ("zero 3", "state.flat_params(len(batch))", "state.flat_params()"),
    "a count of microbatches": ("zero 3", "state.flat_params(len(batch))", "state.flat_params(2)"),
    "the buffers twice": (
        "zero 0",
        "    flat_params = state.flat_params()\n",
        "    flat_params = state.flat_params()\n" * 2,
    ),
    "buffers for nothing": (
        "tiny_llama",
        "    grad_norm = (",
        "    flat_params = state.flat_params(len(batch))\n    grad_norm = (",
    ),
    "the model without buffers": (
        "zero 3",
        "loss_sum = model(tokens, labels, flat_params)",
        "loss_sum = model(tokens, labels)",
    ),
    "a bucket without turns": ("zero 1", "per_layer=True, ", ""),
    "a bucket with turns": ("zero 1", "'norm', weight_decay=0.0), ", "'norm', weight_decay=0.0), per_layer=True, "),
    "a bucket that is not shared out": ("zero 1", "per_layer=True, shard_axes=('dp',))", "per_layer=True)"),
    "a bucket shared out otherwise": (
        "zero 1",
        "per_layer=True, shard_axes=('dp',))",
        "per_layer=True, shard_axes=('tp',))",
    ),
    "gradients kept": ("zero 3", ", shard_gradients=True", ""),
    "weights kept": ("zero 3", ", reshard_after_forward=True", ""),
    "weights freed in the state alone": (
        "zero 1",
        "shard_axes=('dp',))",
        "shard_axes=('dp',), reshard_after_forward=True)",
    ),
    "more turns ahead": ("zero 3", "prefetch=2", "prefetch=3"),
    "fewer turns ahead": ("zero 3", ", prefetch=2", ""),
}
"""Of programs with a bucket for each turn: (plan, code, what stands there instead, and more such pairs)."""


@pytest.mark.parametrize("what", LAYERS_OF_STAGE)
def test_another_flow_of_buckets_is_rejected(what: str) -> None:
    plan, *changes = LAYERS_OF_STAGE[what]
    text, program = compiled(plan)
    text = with_imports(ast.unparse(ast.parse(text)))
    check(text, program)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    with pytest.raises(AssertionError, match=r"emit: line \d+: "):
        check(text, program)


def test_turns_are_told_of_backward_by_what_it_comes_along() -> None:
    """Of `x` nothing reads what the last turn makes: backward comes there by `y`, which has the loss."""
    text, program = compiled("zero 3, taken on")
    assert "y = reshard(y, layer_dp_tp, self.dp)" in text
    for function in ("reduce_grads_in_backward", "unshard", "reshard"):
        text = text.replace(f"y = {function}(y,", f"x = {function}(x,")
    with pytest.raises(AssertionError, match="passes `x` on as `x`, not `y`"):
        check(text, program)
