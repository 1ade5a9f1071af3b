"""The read-back check of programs in stages: what is emitted is accepted under every schedule,
and nothing else.
"""

from typing import Any

import pytest

from helpers.readback_plans import (
    CHUNKS,
    FP16,
    LLAMA,
    SKIP,
    demand_accepted,
    demand_refused,
    demand_rejected,
    staged,
)
from scalec.compiler.emit.readback import check, check_files
from scalec.compiler.emit.train_py import program_files, train_py
from scalec.compiler.ir import Program
from scalec.compiler.ir.stages import stages
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

SCHEDULES = (
    *(
        "gpipe",
        "1f1b",
        CHUNKS,
        "breadth_first(chunks=2)",
        "zb_h1",
        "zb_h2",
        "interleaved_zero_bubble(chunks=2)",
    ),
    *("zbv", "dualpipev"),
)


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("model", "cut"), [(LLAMA, "layers"), (SKIP, "layers, blocks")])
def test_what_is_emitted_under_a_schedule_does_every_op(
    model: str, cut: str, schedule: str
) -> None:
    source = Source("staged.scale", staged(model, schedule, cut, options=FP16))
    program = compile_plan(source)
    assert check(train_py(program, source), program) == len(program.ops)


ONE, TWO, WHOLE = "stages", "stages, two repeats", "stages, one repeat whole"
OTHER = "stages, other values"
ENTRY = "        if stage == FIRST:\n"
FIRST = "            x = embedding(tokens, self.wte, self.tp)\n"
SCATTERED = "            x = reduce_scatter(x, self.tp, dim=0)\n"
SILU = "            s = silu(x)\n"
BETWEEN = "        if stage == 1:\n            s = s * x\n"
UNPACKED = "        else:\n            x, s = carried\n"
LAYERS = "        for i in LAYERS_OF_STAGE['layers'][stage]:\n"
LAYER = "            x = self.layers[str(i)](x, self.rotary)\n"
RECOMPUTED = (
    "            x, s = recomputed(self.layers[str(i)], x, s, layers_draws[i], self.rotary,"
    " enabled=i % 2 == 0)\n"
)
BLOCKS = "        for i in LAYERS_OF_STAGE['blocks'][stage]:\n"
BLOCK = "            x, s = self.blocks[str(i)](x, s, blocks_draws[i])\n"
LEAVES = "        if stage < LAST:\n            return (x, s)\n"
LEAVES_ONE = "        if stage < LAST:\n            return x\n"
NORMED = "        n = rms_norm(x, self.norm, eps=1e-05)\n"
RAN = "PIPELINE.run(model, batch, inv_num_tokens, mesh, flat_params)"
RUN = f"    loss = {RAN}\n"
EVALUATE = "    loss = PIPELINE.evaluate(model, batch, mesh, flat_params)\n"
GATHERS = (
    "    unshard_ahead(dp, flat_params['layers.matrices'], flat_params['vectors'],"
    " flat_params['matrices'])\n"
)
REDUCED = "shard_axes=('dp',), reduce_axes=('tp',), stages='pp'"
HELD = (
    "self.layers = nn.ModuleDict({str(i): Layer(mesh) for stage in stages for i in"
    " LAYERS_OF_STAGE['layers'][stage]})\n"
)
FORKED = "        layers_draws = fork(draws, LAYERS)\n"
ONE_UNPACKED = "        elif stage <= 2:\n            y = carried\n"
NARROWED_UNPACKED = "        if 1 < stage <= 2:\n            y = carried\n"
OTHER_UNPACKED = "        else:\n            x, z = carried\n"
TIED_SUM = "    all_reduce_(gradients['matrices'], pp)\n"
HEADER = "self, stage: int, x: Tensor, tokens: Tensor, labels: Tensor)"
WHOLE_BLOCKS = "            for block in self.blocks:\n                x = block(x)\n"

DEFECTS = {
    # ---- branches
    "a branch of another stage": (ONE, "if stage == FIRST:", "if stage == 1:"),
    "a branch of a later stage": (TWO, "if stage == 1:", "if stage == 2:"),
    "a branch of all but a stage": (TWO, "if stage == 1:", "if stage != 1:"),
    "a branch of an earlier group": (TWO, "if stage == 1:", "if stage == FIRST:"),
    "a branch of several stages": (ONE, "if stage == FIRST:", "if stage in (0, 3):"),
    "a branch by another name": (ONE, "if stage == FIRST:", "if x == 0:"),
    "a branch left out": (TWO, BETWEEN, ""),
    "a branch twice": (TWO, BETWEEN, BETWEEN * 2),
    "a branch before the layers": (TWO, BETWEEN, "", LAYERS, BETWEEN + LAYERS),
    "a branch behind the layers": (TWO, BETWEEN, "", LEAVES, BETWEEN + LEAVES),
    "a branch behind what leaves": (TWO, BETWEEN, "", LEAVES, LEAVES + BETWEEN),
    "a branch's op done by all": (TWO, BETWEEN, "        s = s * x\n"),
    "a branch's op done by all, at the end of the first": (
        TWO,
        SILU,
        "",
        LAYERS,
        "        s = silu(x)\n" + LAYERS,
    ),
    "the last stage's op done by another": (
        ONE,
        NORMED,
        "",
        SCATTERED,
        SCATTERED + "    " + NORMED,
    ),
    "the last stage's op done by all": (ONE, NORMED, "", LEAVES_ONE, NORMED + LEAVES_ONE),
    "the first stage's op done by the last": (
        WHOLE,
        WHOLE_BLOCKS,
        "",
        LEAVES_ONE,
        LEAVES_ONE + WHOLE_BLOCKS,
    ),
    "an op in another branch": (
        TWO,
        SILU,
        "",
        BETWEEN,
        BETWEEN.replace("            s", SILU + "            s"),
    ),
    "a branch with another": (
        ONE,
        SCATTERED,
        SCATTERED + "        else:\n            x = tokens\n",
    ),
    "a branch with more": (TWO, BETWEEN, BETWEEN + "        elif stage == 2:\n            s = x\n"),
    "a branch that ends a stage": (
        TWO,
        "            s = s * x\n",
        "            s = s * x\n            return s\n",
    ),
    "a name of another branch": (
        TWO,
        SILU,
        SILU + "            t = silu(x)\n",
        "s = s * x",
        "s = t * x",
    ),
    "a name of an input that a branch takes": (
        ONE,
        SCATTERED,
        SCATTERED + "            labels = tokens\n",
    ),
    "draws of the first stage alone": (TWO, FORKED, "", FIRST, "    " + FORKED + FIRST),
    "draws in the middle": (TWO, FORKED, "", BETWEEN, BETWEEN + FORKED),
    # ---- what crosses
    "what enters is not unpacked": (TWO, UNPACKED, ""),
    "what enters is dropped": (TWO, UNPACKED, "        else:\n            pass\n"),
    "what enters is called so": (TWO, "x, s = carried", "x = carried"),
    "what enters is swapped": (TWO, "x, s = carried", "s, x = carried"),
    "what enters is unpacked by all": (TWO, UNPACKED, "        x, s = carried\n"),
    "what enters is unpacked elsewhere": (TWO, UNPACKED, "", BETWEEN, BETWEEN + UNPACKED),
    "part of what enters is left": (TWO, "x, s = carried", "x, _ = carried"),
    "something else is unpacked": (TWO, "x, s = carried", "x, s = draws"),
    "what enters is replaced": (
        ONE,
        ENTRY,
        f"        x = tokens\n{ENTRY}",
    ),
    "what leaves is swapped": (TWO, LEAVES, LEAVES.replace("(x, s)", "(s, x)")),
    "part of what leaves is left": (TWO, LEAVES, LEAVES.replace("(x, s)", "x")),
    "something else leaves": (ONE, "            return x\n", "            return labels\n"),
    "too few leave": (TWO, "if stage < LAST:", "if stage < 2:"),
    "too many leave": (ONE, "if stage < LAST:", "if stage < 4:"),
    "none leaves": (ONE, LEAVES_ONE, ""),
    "all leave": (ONE, LEAVES_ONE, "        return x\n"),
    "what leaves early": (ONE, LEAVES_ONE, "", LAYERS, LEAVES_ONE + LAYERS),
    "what leaves twice": (ONE, LEAVES_ONE, LEAVES_ONE * 2),
    "what leaves is changed before": (TWO, LEAVES, "        x = s\n" + LEAVES),
    "what enters has another type": (TWO, "carried: tuple[Tensor, Tensor]", "carried: Tensor"),
    "what leaves has another type": (TWO, "-> tuple[Tensor, Tensor] | Tensor:", "-> Tensor:"),
    "another order of arguments": (
        ONE,
        HEADER,
        "self, x: Tensor, stage: int, tokens: Tensor, labels: Tensor)",
    ),
    "inputs in another order": (
        ONE,
        HEADER,
        "self, stage: int, x: Tensor, labels: Tensor, tokens: Tensor)",
    ),
    "no stage is asked for": (ONE, "stage: int, ", ""),
    "an argument with a default": (ONE, "stage: int,", "stage: int=0,"),
    # ---- where other values cross than elsewhere
    "too many begin in the first": (OTHER, "elif stage <= 1:", "elif stage <= 2:"),
    "all but one begin in the first": (OTHER, "elif stage <= 1:", "else:"),
    "too few begin in the second": (OTHER, "elif stage <= 2:", "elif stage <= 1:"),
    "what enters the second is not unpacked": (OTHER, ONE_UNPACKED, ""),
    "what enters the second is unpacked twice": (
        OTHER,
        ONE_UNPACKED,
        ONE_UNPACKED + NARROWED_UNPACKED,
    ),
    "what enters the last is swapped": (OTHER, "x, z = carried", "z, x = carried"),
    "what enters the last by other names": (OTHER, "x, z = carried", "x, s = carried"),
    "one of two leaves the first": (OTHER, "return (x, s)", "return x"),
    "the first is not left": (OTHER, "        if stage < 1:\n            return (x, s)\n", ""),
    "the first is left later": (
        *(OTHER, "        if stage < 1:\n            return (x, s)\n", ""),
        *(
            "        if stage < 2:\n            return y\n",
            "        if stage < 2:\n            return (x, s)\n",
        ),
    ),
    "too many leave the first": (OTHER, "if stage < 1:", "if stage < 2:"),
    "too many leave the second": (OTHER, "if stage < 2:", "if stage < LAST:"),
    "the second is left by the first's values": (
        OTHER,
        "            return y\n",
        "            return x\n",
    ),
    "a value of the first in the last": (OTHER, "x = silu(z)", "x = silu(s)"),
    "a value that does not cross": (
        OTHER,
        "            x = silu(z)\n",
        "            x = silu(z)\n            z = y\n",
    ),
    "layers carry less": (OTHER, "x, z = self.rest[str(i)](x, z)", "x = self.rest[str(i)](x, z)"),
    "the values of another cut": (
        OTHER,
        "'y', (SEQ, 2, FFN // 2), torch.float32,",
        "'y', (8, 2, 32), torch.float32,",
    ),
    "values of more cuts": (OTHER, "cuts=range(1, 2)", "cuts=range(1, 3)"),
    "values of other cuts": (OTHER, "cuts=range(1, 2)", "cuts=range(0, 1)"),
    "values of all cuts": (OTHER, ", cuts=range(1, 2)", ""),
    "one value of a cut left out": (
        OTHER,
        "StageInput('x', (SEQ // 2, 2, HIDDEN), torch.float32, cuts=range(2, 3)), S",
        "S",
    ),
    "what enters is two always": (
        OTHER,
        "carried: tuple[Tensor, Tensor] | Tensor",
        "carried: tuple[Tensor, Tensor]",
    ),
    "what leaves is two always": (
        OTHER,
        "-> tuple[Tensor, Tensor] | Tensor",
        "-> tuple[Tensor, Tensor]",
    ),
    # ---- layers
    "layers of another repeat": (TWO, BLOCKS, BLOCKS.replace("blocks", "layers")),
    "layers of another stage": (ONE, LAYERS, LAYERS.replace("[stage]", "[0]")),
    "layers of another rank": (ONE, LAYERS, LAYERS.replace("[stage]", "[stage - 1]")),
    "all layers": (ONE, LAYERS, "        for i in range(4):\n"),
    "all modules": (
        ONE,
        LAYERS + LAYER,
        "        for layer in self.layers:\n            x = layer(x, self.rotary)\n",
    ),
    "turns backwards": (
        ONE,
        LAYERS,
        "        for i in reversed(LAYERS_OF_STAGE['layers'][stage]):\n",
    ),
    "layers twice": (ONE, LAYERS + LAYER, (LAYERS + LAYER) * 2),
    "no layers": (ONE, LAYERS + LAYER, ""),
    "repeats swapped": (
        TWO,
        LAYERS + RECOMPUTED + BETWEEN + BLOCKS + BLOCK,
        BLOCKS + BLOCK + BETWEEN + LAYERS + RECOMPUTED,
    ),
    "a layer twice": (ONE, LAYER, LAYER * 2),
    "a layer's ops beside its module": (TWO, BLOCK, BLOCK + "            s = silu(x)\n"),
    "another layer's module": (ONE, "self.layers[str(i)]", "self.layers[str(0)]"),
    "the module of a stage": (ONE, "self.layers[str(i)]", "self.layers[str(stage)]"),
    "another repeat's module": (TWO, "self.blocks[str(i)]", "self.layers[str(i)]"),
    "a module by number": (ONE, "self.layers[str(i)]", "self.layers[i]"),
    "draws of another layer": (TWO, "blocks_draws[i]", "blocks_draws[0]"),
    "draws of a stage": (TWO, "blocks_draws[i]", "blocks_draws[stage]"),
    "draws of all layers": (TWO, "blocks_draws[i]", "blocks_draws"),
    "draws of the sample": (TWO, "blocks_draws[i]", "draws"),
    "draws of another repeat": (TWO, "blocks_draws[i]", "layers_draws[i]"),
    "draws forked otherwise": (TWO, "fork(draws, LAYERS)", "fork(draws, 3)"),
    "operands of a layer swapped": (TWO, "(x, s, blocks_draws[i])", "(s, x, blocks_draws[i])"),
    "results of a layer swapped": (TWO, BLOCK, BLOCK.replace("x, s =", "s, x =")),
    "a layer's result by another name": (ONE, LAYER, LAYER.replace("x =", "y =")),
    "every layer recomputed": (TWO, ", enabled=i % 2 == 0)", ")"),
    "nothing recomputed": (
        *(
            TWO,
            "recomputed(self.layers[str(i)], x, s, layers_draws[i], self.rotary, enabled=i % 2"
            " == 0)",
        ),
        "recomputed()",
    ),
    "other layers recomputed": (TWO, "enabled=i % 2 == 0", "enabled=i % 2 == 1"),
    "fewer layers recomputed": (TWO, "enabled=i % 2 == 0", "enabled=i % 3 == 0"),
    "layers of a stage recomputed": (TWO, "enabled=i % 2 == 0", "enabled=stage % 2 == 0"),
    "layers that are kept": (TWO, "recomputed(self.layers[str(i)], x", "self.layers[str(i)](x"),
    "layers that are recomputed": (
        TWO,
        "self.blocks[str(i)](x",
        "recomputed(self.blocks[str(i)], x",
    ),
    "another function for again": (TWO, "recomputed(self.layers", "recompute(self.layers"),
    "a loop variable that is the stage": (
        ONE,
        LAYERS + LAYER,
        (LAYERS + LAYER).replace(" i ", " stage ").replace("(i)", "(stage)"),
    ),
    "a loop variable that crosses": (
        ONE,
        LAYERS + LAYER,
        (LAYERS + LAYER).replace(" i ", " x ").replace("(i)", "(x)"),
    ),
    "a loop with an end": (ONE, LAYER, LAYER + "        else:\n            x = x\n"),
    "the stage anew": (ONE, ENTRY, f"        stage = tokens\n{ENTRY}"),
    "a name for layers": (
        ONE,
        ENTRY,
        f"        LAYERS_OF_STAGE = tokens\n{ENTRY}",
    ),
    "a name for Python's own": (
        ONE,
        ENTRY,
        f"        str = tokens\n{ENTRY}",
    ),
    # ---- what is declared
    "a weight for another stage": (ONE, "if LAST in stages:", "if 2 in stages:"),
    "a weight for one stage of two": (ONE, "if {FIRST, LAST} & {*stages}:", "if FIRST in stages:"),
    "a weight for more stages": (
        ONE,
        "if {FIRST, LAST} & {*stages}:",
        "if {FIRST, 1, LAST} & {*stages}:",
    ),
    "a weight for stages together": (
        ONE,
        "if {FIRST, LAST} & {*stages}:",
        "if {FIRST, LAST} <= {*stages}:",
    ),
    "a weight for all stages": (
        ONE,
        "        if LAST in stages:\n            self.norm",
        "        self.norm",
    ),
    "a weight for all other stages": (ONE, "if LAST in stages:", "if 3 not in stages:"),
    "a weight otherwise": (
        ONE,
        "        if LAST in stages:\n            self.norm",
        "        else:\n            self.norm",
    ),
    "modules for some stages": (ONE, HELD, "\n        if 1 in stages:\n            " + HELD),
    "a table for some stages": (
        *(ONE, "        rotary = rope", "        if FIRST in stages:\n            rotary = rope"),
        *("        self.register_buffer", "            self.register_buffer"),
    ),
    "modules of another repeat's layers": (
        TWO,
        "Block(mesh) for stage in stages for i in LAYERS_OF_STAGE['blocks']",
        "Block(mesh) for stage in stages for i in LAYERS_OF_STAGE['layers']",
    ),
    "modules of another class": (TWO, "str(i): Block(mesh)", "str(i): Layer(mesh)"),
    "modules of other stages": (ONE, "for stage in stages for", "for stage in stages[1:] for"),
    "modules under other names": (ONE, "{str(i): Layer", "{str(i + 1): Layer"),
    "modules for every layer": (
        ONE,
        HELD,
        "self.layers = nn.ModuleList((Layer(mesh) for _ in range(4)))\n",
    ),
    "stages of its own": (
        ONE,
        "        super().__init__()\n        self.tp = mesh.axis('tp')\n        if",
        "        super().__init__()\n        self.tp = mesh.axis('tp')\n        stages = (0,"
        " 3)\n        if",
    ),
    "stages unasked": (ONE, "self, mesh: Mesh, stages: tuple[int, ...]", "self, mesh: Mesh"),
    "whole modules for another stage": (
        WHOLE,
        "            self.blocks = ",
        "        if 1 in stages:\n            self.blocks = ",
    ),
    "whole modules for all": (WHOLE, "            self.blocks = ", "        self.blocks = "),
    "whole modules run by layers": (
        WHOLE,
        WHOLE_BLOCKS,
        "            for i in LAYERS_OF_STAGE['layers'][stage]:\n                x ="
        " self.blocks[str(i)](x)\n",
    ),
    "whole modules run by all": (
        WHOLE,
        WHOLE_BLOCKS,
        "",
        LAYERS,
        "        for block in self.blocks:\n            x = block(x)\n" + LAYERS,
    ),
    "functions of programs that do not split": (
        WHOLE,
        "split_linear(n, self.head)",
        "linear(n, self.head)",
    ),
    # ---- layers, stage_to_rank and rows
    "layers of a stage": (ONE, "(range(0, 1), range(1, 2)", "(range(0, 2), range(2, 2)"),
    "stages swapped": (ONE, "(range(0, 1), range(1, 2)", "(range(1, 2), range(0, 1)"),
    "layers under another name": (TWO, "'blocks': (range(0, 0)", "'layers': (range(0, 0)"),
    "another home": (ONE, "stage_to_rank=(0, 1, 0, 1)", "stage_to_rank=(0, 1, 1, 0)"),
    "another axis": (ONE, "Pipeline('pp'", "Pipeline('dp'"),
    "another shape": (ONE, "StageInput('x', (SEQ // 2, 2, HIDDEN)", "StageInput('x', (16, 2, 32)"),
    "another element type": (
        ONE,
        "(SEQ // 2, 2, HIDDEN), torch.float32)",
        "(SEQ // 2, 2, HIDDEN), torch.bfloat16)",
    ),
    "no gradient of what crosses": (
        ONE,
        "torch.float32),), schedule",
        "torch.float32, gradient=False),), schedule",
    ),
    "another name for what crosses": (ONE, "StageInput('x'", "StageInput('y'"),
    "less that crosses": (TWO, "StageInput('x', (SEQ // 2, 2, HIDDEN), torch.float32), S", "S"),
    "another file of rows": (WHOLE, "'schedule.csv'", "'rows.csv'"),
    "rows of another hash": (WHOLE, "sha256='", "sha256='0"),
    "another file of groups": (WHOLE, "'message_groups.csv'", "'schedule.csv'"),
    "every message alone": (ONE, ", message_groups=", ", other="),
    "rows that lie elsewhere": (WHOLE, "beside=__file__", "beside='/tmp/train.py'"),
    "the pipeline twice": (ONE, "\nPLAN = ", "\nPIPELINE = None\nPLAN = "),
    "no layers at all": (ONE, "LAYERS_OF_STAGE = ", "TURNS_ = "),
    # ---- steps
    "another seed": (ONE, RAN, RAN.replace("inv_num_tokens", "num_tokens")),
    "a seed of its own": (ONE, RAN, RAN.replace("inv_num_tokens", "inv_num_tokens / 2")),
    "no seed": (ONE, RAN, RAN.replace("inv_num_tokens, ", "")),
    "another batch": (ONE, "PIPELINE.run(model, batch,", "PIPELINE.run(model, batch.labels,"),
    "another mesh": (ONE, RAN, RAN.replace("mesh", "dp")),
    "more that is given": (ONE, RAN, RAN.replace("flat_params", "flat_params, inv_num_tokens")),
    "run twice": (ONE, RUN, RUN * 2),
    "never run": (ONE, RUN, ""),
    "evaluated in training": (ONE, RUN, EVALUATE),
    "run in evaluation": (ONE, EVALUATE, RUN),
    "another method": (ONE, "PIPELINE.evaluate(", "PIPELINE.run("),
    "a loop over microbatches": (
        *(ONE, EVALUATE),
        "    loss = torch.zeros_like(inv_num_tokens)\n"
        "    for tokens, labels in batch.microbatches():\n        loss += model(tokens, labels)\n",
    ),
    "another pipeline": (ONE, RUN, "    PIPELINE = num_tokens\n" + RUN),
    "rows before the weights are gathered": (
        ONE,
        RUN,
        "",
        GATHERS,
        RUN + GATHERS,
    ),
    "no chunks given": (ONE, RAN, RAN.replace(", flat_params", "")),
    "no chunks evaluated": (ONE, EVALUATE, EVALUATE.replace(", flat_params", "")),
    "a chunk never gathered": (ONE, GATHERS, GATHERS.replace(", flat_params['vectors']", "")),
    "no chunk gathered": (ONE, GATHERS, ""),
    "chunks gathered in another order": (
        ONE,
        "flat_params['vectors'], flat_params['matrices'])",
        "flat_params['matrices'], flat_params['vectors'])",
    ),
    "chunks gathered over another axis": (ONE, "unshard_ahead(dp,", "unshard_ahead(tp,"),
    "chunks gathered twice": (ONE, GATHERS, GATHERS * 2),
    "a chunk never reduced": (ONE, REDUCED, "stages='pp'"),
    "a chunk reduced over another axis": (ONE, REDUCED, REDUCED.replace("('tp'", "('dp'")),
    "a chunk scattered in part": (ONE, REDUCED, REDUCED.replace(" reduce_axes=('tp',),", "")),
    "a chunk added up whole": (ONE, REDUCED, REDUCED.replace("shard_axes=('dp',), ", "")),
    "a chunk sent as another type": (ONE, REDUCED, f"{REDUCED}, reduce_dtype=torch.bfloat16"),
    "reduced microbatch by microbatch": (ONE, REDUCED, f"{REDUCED}, shard_gradients=True"),
    "chunks counted": (ONE, "state.flat_params()", "state.flat_params(len(batch))"),
    "a chunk's norm alone": (ONE, "*gradients['vectors']", "gradients['vectors']"),
    "a copy taken apart": (
        ONE,
        "sum_squares(gradients['matrices']",
        "sum_squares(*gradients['matrices']",
    ),
    "the mesh behind": (
        ONE,
        "    mesh = state.mesh\n",
        "",
        "    num_tokens = all",
        "    mesh = state.mesh\n    num_tokens = all",
    ),
    "the loss of one stage": (ONE, "all_reduce_(loss, pp_dp)", "all_reduce_(loss, dp)"),
    "a tied gradient not summed": (ONE, TIED_SUM, ""),
    "a gradient summed over stages": (
        ONE,
        TIED_SUM,
        f"{TIED_SUM}    all_reduce_(gradients['vectors'], pp)\n",
    ),
    "a tied gradient summed over some": (ONE, "pp = mesh.axis('pp')", "pp = mesh.among('pp', 0)"),
    "squares counted twice": (ONE, ", once=pp)", ")"),
    "squares counted once": (
        ONE,
        "sum_squares(*gradients['vectors'])",
        "sum_squares(*gradients['vectors'], once=pp)",
    ),
    "squares counted once over another axis": (ONE, ", once=pp)", ", once=tp)"),
    "squares of one stage": (ONE, "gradients['vectors']), pp_dp)", "gradients['vectors']), dp)"),
    "the model whole": (
        ONE,
        "model, stages_of_param = PIPELINE.build(Small, mesh)",
        "model = Small(mesh, (0, 1, 2, 3))",
    ),
    "nobody's holders": (ONE, ", stages_of_param=stages_of_param", ""),
    "another model's holders": (ONE, "PIPELINE.build(Small, mesh)", "PIPELINE.build(Layer, mesh)"),
    "a bucket without stages": (
        ONE,
        "shard_axes=('dp',), stages='pp', among=(0, 1))",
        "shard_axes=('dp',))",
    ),
    "a bucket of another axis": (ONE, "stages='pp', among", "stages='tp', among"),
    "a bucket among fewer": (ONE, ", among=(0, 1))", ")"),
    "a bucket among others": (ONE, "among=(0, 1)", "among=(1, 0)"),
}
"""(plan, code as `ast.unparse` writes it, what stands there instead, and more such pairs)."""


@pytest.mark.sample(40)
@pytest.mark.parametrize("what", DEFECTS)
def test_another_program_in_stages_is_rejected(what: str) -> None:
    demand_rejected(*DEFECTS[what])


ROWS = {
    "an action twice": ("0F0,", "0F0,0F0,"),
    "an action less": ("0F0,", ""),
    "another action": ("0F0,", "0B0,"),
    "actions swapped": ("2F0,2SEND_F0", "2SEND_F0,2F0"),
    "another microbatch": ("0F0,0SEND_F0,0F1,", "0F1,0SEND_F0,0F0,"),
    "half of an action": (",0B0,", ",0I0,"),
    "a space": ("0F0,", "0F0, "),
    "a row less": ("\n", ","),
    "an empty row": ("\n", "\n\n"),
}


@pytest.mark.parametrize("what", ROWS)
def test_other_rows_beside_the_program_are_rejected(what: str) -> None:
    program, source = _staged()
    demand_refused(program_files(program, source), program, "schedule.csv", *ROWS[what])


def test_other_groups_beside_the_program_are_rejected() -> None:
    program, source = _staged()
    files = program_files(program, source)
    first, _, rest = files["message_groups.csv"].partition(",")
    for wrong in ("", rest, first.replace(" ", ",")):
        demand_refused(files, program, "message_groups.csv", files["message_groups.csv"], wrong)


def _staged() -> tuple[Program, Source]:
    source = Source("staged.scale", staged(LLAMA, CHUNKS))
    return compile_plan(source), source


@pytest.mark.parametrize(
    "files", [{}, {"rows.csv": ""}, {"schedule.csv": ""}, {"schedule.csv": "", "rows.csv": ""}]
)
def test_other_files_beside_the_program_are_rejected(files: dict[str, str]) -> None:
    written = program_files(*_staged())
    kept = {name: written[name] for name in ("train.py", "hf_names.json", "predictions.json")}
    with pytest.raises(
        AssertionError,
        match=r"emit: (message_groups|rows|schedule)\.csv is not the file that the program reads",
    ):
        check_files({**kept, **files})


EQUAL = {
    "draws behind": (
        *(TWO, "        blocks_draws = fork(draws, BLOCKS)\n", ""),
        *(BLOCKS, "        blocks_draws = fork(draws, BLOCKS)\n" + BLOCKS),
    ),
    "all but one leave": (ONE, "if stage < LAST:", "if stage != LAST:"),
    "all of the last begin": (
        OTHER,
        OTHER_UNPACKED,
        OTHER_UNPACKED.replace("else", "elif stage <= 3"),
    ),
    "stages of a weight by name": (
        ONE,
        "if {FIRST, LAST} & {*stages}:",
        "if {LAST, FIRST} & {*stages}:",
    ),
    "a branch for a whole condition": (ONE, "if stage == FIRST:", "if FIRST == stage:"),
    "a stage by number": (ONE, "if stage == FIRST:", "if stage == 0:"),
    "a branch by order": (ONE, "if stage == FIRST:", "if stage < 1:"),
}
"""The same in other words: each stage does what it did."""


@pytest.mark.parametrize("what", EQUAL)
def test_the_same_program_in_other_words_is_accepted(what: str) -> None:
    demand_accepted(*EQUAL[what])


def _many_stages(layers: int, schedule: str) -> tuple[Program, str]:
    """A pipeline of 12 ranks."""
    text = staged(LLAMA, schedule, options="").replace("pp = 2", "pp = 12")
    text = text.replace("layers = 4", f"layers = {layers}").replace("_batch = 16", "_batch = 192")
    source = Source("staged.scale", text)
    program = compile_plan(source)
    return program, train_py(program, source)


def _constant(text: str, begin: str, end: str) -> Any:
    """The value of an expression in a program, between two texts."""
    return eval(text.split(begin)[1].split(end)[0])


@pytest.mark.parametrize(
    ("layers", "schedule"),
    [(24, "1f1b"), (12, "1f1b"), (31, "1f1b"), (48, CHUNKS), (55, CHUNKS), (48, "zbv")],
)
def test_tables_of_many_stages_are_those_of_the_plan(layers: int, schedule: str) -> None:
    """Each is an expression, which Python runs here."""
    program, text = _many_stages(layers, schedule)
    pipeline = program.pipeline
    assert pipeline
    by_repeat = _constant(text, "LAYERS_OF_STAGE = ", "\n\n")
    assert by_repeat == {"layers": tuple(stage.layers[0] for stage in stages(program, pipeline))}
    assert _constant(text, "stage_to_rank=", ",\n    stage_inputs") == pipeline.stage_to_rank
    assert check(text, program) == len(program.ops)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("i + 2) for", "i + 3) for"),
        ("for i in range(0, 48, 2)", "for i in range(1, 48, 2)"),
        ("for i in range(0, 48, 2)", "for i in range(0, 48, 0)"),
        ("tuple(range(i", "range(range(i"),
        ("(*range(12), *range(12))", "(*range(12), *range(11, -1, -1))"),
        ("(*range(12), *range(12))", "(*range(10**9), *range(12))"),
        ("(*range(12), *range(12))", "10**9 * (0, 1)"),
        ("(*range(12), *range(12))", "2 * (0, 1)"),
    ],
)
def test_other_tables_of_many_stages_are_rejected(old: str, new: str) -> None:
    program, text = _many_stages(48, CHUNKS)
    assert text.count(old) == 1
    with pytest.raises(AssertionError, match=r"emit: line \d+: "):
        check(text.replace(old, new), program)
