"""The read-back refuses programs that move the buckets of layers in any other way than the IR."""

import pytest

from helpers.readback_plans import compiled, demand_rejected
from scalec.compiler.emit.readback import check

GATHERED = "            x = unshard(x, params)\n"
REDUCED = "            x = reduce_grads_in_backward(x, params)\n"
TURN = "            x = layer(x, self.rotary)\n"
FREED = "            x = reshard(x, params)\n"
EACH = "    unshard_ahead(dp, flat_params['layers'])\n"
TABLES = "'matrices': Bucket(ParamGroup('wte', 'head', weight_decay=0.0), shard_axes=('dp',))"
NORM = "'vectors': Bucket(ParamGroup('norm', weight_decay=0.0), shard_axes=('dp',))"
ZIPPED = "for layer, params in zip(self.layers, flat_params['layers'], strict=True)"
WHOLE = "    all_gather_(weights['matrices'], dp)\n"
LOSS_SUM = "    loss = all_reduce_(loss, dp)"

FLOWS = {
    "a reduction is left out": ("zero 0", REDUCED, ""),
    "a reduction twice": ("zero 0", REDUCED, REDUCED * 2),
    "a reduction beside a gather": ("zero 3", GATHERED, REDUCED + GATHERED),
    "a reduction for a gather": ("zero 3", GATHERED, REDUCED),
    "a gather for a reduction": ("zero 0", REDUCED, GATHERED),
    "a reduction over another axis": ("zero 3", "reduce_axes=('tp',)", "reduce_axes=('dp',)"),
    "a sum in place of a part": ("zero 1", "shard_axes=('dp',))", "reduce_axes=('dp',))"),
    "part and sum exchanged": (
        "zero 3",
        "shard_axes=('dp',), reduce_axes=('tp',)",
        "shard_axes=('tp',), reduce_axes=('dp',)",
    ),
    "a part without its sum": ("zero 3", ", reduce_axes=('tp',)", ""),
    "a sum without its part": (
        "zero 3",
        "shard_axes=('dp',), reduce_axes=('tp',)",
        "reduce_axes=('tp',)",
    ),
    "a part that is summed over another axis": (
        "zero 1, hybrid",
        "reduce_axes=('replica',)",
        "reduce_axes=('tp',)",
    ),
    "a sum that the IR does not have": (
        "zero 1",
        "per_layer=True, shard_axes=('dp',))",
        "per_layer=True, shard_axes=('dp',), reduce_axes=('tp',))",
    ),
    "a reduction in each microbatch": (
        "zero 1",
        "per_layer=True, shard_axes=('dp',))",
        "per_layer=True, shard_axes=('dp',), shard_gradients=True)",
    ),
    "a reduction after the layer": ("zero 0", REDUCED, "", TURN, TURN + REDUCED),
    "a reduction before the loop": (
        "zero 0",
        REDUCED,
        "",
        "        for layer,",
        REDUCED[4:] + "        for layer,",
    ),
    "a reduction of what does not go on": ("zero 0", REDUCED, REDUCED.replace("x =", "y =")),
    "a gather of what does not go on": ("zero 3", GATHERED, GATHERED.replace("x =", "y =")),
    "a gather beside the carried": ("zero 3, two carried", GATHERED, GATHERED.replace("x", "y")),
    "a reduction in the state's dtype": ("fp16, zero 3", ", reduce_dtype=torch.bfloat16", ""),
    "a reduction in another dtype": (
        "fp16, zero 1",
        "reduce_dtype=torch.bfloat16",
        "reduce_dtype=torch.float16",
    ),
    "a reduction in a dtype of its own": (
        "zero 1",
        "per_layer=True, shard_axes=('dp',))",
        "per_layer=True, shard_axes=('dp',), reduce_dtype=torch.bfloat16)",
    ),
    "the step reduces again": (
        "zero 1",
        "    grad_norm = ",
        "    gradients['layers.matrices'] = reduce_scatter_(gradients['layers.matrices'],"
        " dp)\n    grad_norm = ",
    ),
    "a gather is left out": ("zero 3", GATHERED, ""),
    "a gather twice": ("zero 3", GATHERED, GATHERED * 2),
    "a gather after the layer": ("zero 3", GATHERED, "", TURN, TURN + GATHERED),
    "a gather before the loop": (
        "zero 3",
        GATHERED,
        "",
        "        for layer,",
        GATHERED[4:] + "        for layer,",
    ),
    "a gather with an axis": ("zero 3", GATHERED, GATHERED.replace("params)", "params, self.tp)")),
    "a gather by keyword": ("zero 3", GATHERED, GATHERED.replace(", params", ", params=params")),
    "a gather of the module": ("zero 3", GATHERED, GATHERED.replace("params", "layer")),
    "weights that stay": ("zero 3", FREED, ""),
    "weights freed twice": ("zero 3", FREED, FREED * 2),
    "weights freed that stay": ("zero 1", TURN, TURN + FREED),
    "weights freed before the layer": ("zero 3", FREED, "", TURN, FREED + TURN),
    "weights freed after the loop": (
        "zero 3",
        FREED,
        "",
        "        n = rms_norm",
        FREED[4:] + "        n = rms_norm",
    ),
    "another function": ("zero 3", FREED, FREED.replace("reshard", "max_logit")),
    "another repeat's groups": ("zero 3", "flat_params['layers']", "flat_params['blocks']"),
    "a bucket's name": ("zero 3", "flat_params['layers']", "flat_params['layers.matrices']"),
    "groups in a loop without any": ("tiny_llama", "for layer in self.layers", ZIPPED),
    "groups twice in a loop": (
        "zero 1",
        ZIPPED,
        "for layer, params, more in zip(self.layers, flat_params['layers'],"
        " flat_params['layers'], strict=True)",
    ),
    "groups more in a loop": (
        "zero 1",
        ZIPPED,
        "for layer, params, more in zip(self.layers, flat_params['layers'],"
        " flat_params['layers.x'], strict=True)",
    ),
    "what is no group in a loop": (
        "zero 1",
        ZIPPED,
        "for layer, params, more in zip(self.layers, flat_params['layers'], self.rotary,"
        " strict=True)",
    ),
    "no groups in a loop": ("zero 1", ZIPPED, "for layer in self.layers", GATHERED, ""),
    "buckets in another order": ("zero 3", f"{TABLES}, {NORM}", f"{NORM}, {TABLES}"),
    "all layers for those inside": (
        "zero 3, nested",
        "block(x, draws, self.rotary, layers_params)",
        "block(x, draws, self.rotary, flat_params['blocks.layers'])",
    ),
    "the outer layers' groups": (
        "zero 3, nested",
        "block(x, draws, self.rotary, layers_params)",
        "block(x, draws, self.rotary, params)",
    ),
    "another repeat's groups inside": (
        "zero 3, nested",
        "flat_params['blocks.layers']",
        "flat_params['layers']",
    ),
    "the outer groups twice": (
        "zero 3, nested",
        "flat_params['blocks.layers']",
        "flat_params['blocks']",
    ),
    "as many as there are": ("zero 3", ", strict=True)", ")"),
    "no wait": ("zero 1", GATHERED, ""),
    "a wait twice": ("zero 1", GATHERED, GATHERED * 2),
    "a wait after the layer": ("zero 1", GATHERED, "", TURN, TURN + GATHERED),
    "no gather of all layers": ("zero 1", EACH, ""),
    "a gather of all layers twice": ("zero 1", EACH, EACH * 2),
    "all layers gathered over another axis": ("zero 1", EACH, EACH.replace("(dp", "(dp_tp")),
    "layers of another repeat gathered": ("zero 1", EACH, EACH.replace("layers", "blocks")),
    "a bucket's layers gathered": ("zero 1", EACH, EACH.replace("layers", "layers.matrices")),
    "all layers gathered twice at once": (
        "zero 1",
        EACH,
        EACH.replace("])", "], flat_params['layers'])"),
    ),
    "all layers gathered first": (
        "zero 1",
        f"    flat_params = state.flat_params(len(batch))\n{EACH}",
        "",
        "    dp_tp = mesh.axis('dp', 'tp')\n",
        "    dp_tp = mesh.axis('dp', 'tp')\n    flat_params ="
        f" state.flat_params(len(batch))\n{EACH}",
    ),
    "all layers gathered after the microbatches": ("zero 1", EACH, "", LOSS_SUM, EACH + LOSS_SUM),
    "whole weights gathered after the microbatches": (
        "zero 3",
        WHOLE,
        "",
        LOSS_SUM,
        WHOLE + LOSS_SUM,
    ),
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
    "a bucket without layers": ("zero 1", "per_layer=True, ", ""),
    "a bucket with layers": (
        "zero 1",
        "'norm', weight_decay=0.0), ",
        "'norm', weight_decay=0.0), per_layer=True, ",
    ),
    "a bucket that is not shared out": (
        "zero 1",
        "per_layer=True, shard_axes=('dp',))",
        "per_layer=True)",
    ),
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
    "more layers ahead": ("zero 3", "prefetch=2", "prefetch=3"),
    "fewer layers ahead": ("zero 3", ", prefetch=2", ""),
}
"""Of programs with a bucket for each layer: (plan, code, what stands there instead, and more
such pairs).
"""


@pytest.mark.sample(22)
@pytest.mark.parametrize("what", FLOWS)
def test_another_flow_of_buckets_is_rejected(what: str) -> None:
    demand_rejected(*FLOWS[what])


def test_turns_are_told_of_backward_by_what_it_comes_along() -> None:
    """Of `x` nothing reads what the last layer makes: backward comes there by `y`, which has
    the loss.
    """
    text, program = compiled("zero 3, taken on")
    assert "y = reshard(y, params)" in text
    for function in ("unshard", "reshard"):
        text = text.replace(f"y = {function}(y,", f"x = {function}(x,")
    with pytest.raises(
        AssertionError, match=r"line \d+: nothing in the IR does `unshard\(x, params\)`"
    ):
        check(text, program)
