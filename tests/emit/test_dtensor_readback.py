"""The read-back of programs of torch alone: each planted edit is refused at its line.

Non-goals: the machine (`test_readback`), and what such programs compute
(`end_to_end.test_torch_target`).
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from emit.test_readback_mutants import KINDS, survivors
from helpers.edited_text import replace_all
from helpers.oracle.plans import Case, plan_text
from scalec.compiler.emit.dtensor import emit, for_torch
from scalec.compiler.emit.dtensor.readback import check
from scalec.compiler.frontend import resolve
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import lower

TINY = Path(__file__).parents[2] / "plans" / "tiny_llama.scale"
CASES = {
    "plain": plan_text(Case(dp=2, tp=2, sp=True, microbatches=2, optimizer="adamw", clip=1.0)),
    "sharded": plan_text(
        Case(replicas=2, dp=2, optimizer="groups", state="zero 3 over dp", recompute="full")
    ),
    "hidden": plan_text(
        Case(
            dp=2,
            tp=2,
            vocab=False,
            model="tied",
            optimizer="momentum",
            recompute="every(2, layers)",
        )
    ),
    "narrow": plan_text(Case(dp=2, tp=2, sp=True, state="zero 3 over dp", precision="bf16")),
    "apart": plan_text(
        Case(
            tp=2,
            sp=True,
            cp=2,
            how="via ring",
            gathered="regather",
            recompute="selective(attention, silu)",
        )
    ),
    "nested": """model nested(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  layers = 2  blocks = 2 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers { repeat blocks { x = x + silu(x @ wte) @ w[vocab -> hidden] + silu(x @ wte) @ v[vocab -> hidden] } }
  loss = cross_entropy(x @ wte, labels)
}
mesh  { dp = 2 }
shard { batch over dp }
train { seq = 8  global_batch = 4  microbatch = 2  steps = 2  precision = bf16  optimizer sgd { lr = 0.1 }
        data text { files = [python_stdlib] } }
""",
    "scaled": plan_text(Case(dp=2, tp=2, precision="fp16  reduce = bf16", clip=1.0)),
    "stages": plan_text(
        Case(
            pp=2,
            dp=2,
            microbatches=4,
            model="tied",
            optimizer="adamw",
            clip=0.05,
            state="zero 1 over dp",
        )
    ),
    "cut": plan_text(Case(pp=2, schedule="zbv", layers=4, microbatches=4, model="tied")),
    "named": 'use "tiny_llama.scale" { train { optimizer adamw { schedule = cosine(warmup = 5,'
    " floor = 1e-5) } } }\n"
    "state { zero 2 over dp }\n",
}


@cache
def compiled(plan: str) -> tuple[str, Program]:
    """The text and the program of a case."""
    source = Source(str(TINY.with_name("variant.scale")), CASES[plan])
    program = lower(for_torch(resolve(source)))
    return emit(program, source)["train.py"], program


PLANTED: dict[str, dict[str, tuple[str, ...]]] = {
    "nested": {
        "a parameter that is not cast": (
            "x = layer(x, self.wte.bfloat16())",
            "x = layer(x, self.wte)",
            "silu(linear(x, wte))",
        )
    },
    "scaled": {
        "a loss without its scale": ("num_tokens, 1) * scale)", "num_tokens, 1))"),
        "gradients that keep the scale": ("gradient.div_(scale)", "gradient.div_(1.0)"),
        "a scale that stays": ("        adapt_loss_scale(optimizer, grad_norm)", "        pass"),
        "sums in more bits": ("(model, torch.bfloat16)", "(model)"),
        "a checkpoint without the scale": (
            "    start_loss_scale(optimizer)\n",
            "",
            "return model, optimizer",
        ),
    },
    "stages": {
        "other layers of a stage": ("(range(0, 1), range(1, 2))", "(range(0, 2), range(2, 2))"),
        "stages of other ranks": ("STAGE_TO_RANK = (0, 1)", "STAGE_TO_RANK = (1, 0)"),
        "a mesh without stages": ('MESH = {"pp": 2, "dp": 2}', 'MESH = {"dp": 2, "pp": 2}'),
        "other axes of DTensors": ('INNER = ("dp",)', 'INNER = ("pp",)'),
        "examples, and more": (
            "    return [\n        example(",
            "    torch.load('x')\n    return [\n        example(",
            "def crossing",
        ),
        "a weight that a stage does not read": (
            "            del self.norm\n",
            "            pass\n",
        ),
        "a weight taken from a stage that reads it": (
            "if stage != LAST:",
            "if stage != FIRST:",
            "self.norm = weight(",
        ),
        "another stage begins": (
            "if self.stage == FIRST:",
            "if self.stage == LAST:",
            "(x,) = received",
        ),
        "a stage that returns too late": (
            "if self.stage < LAST:",
            "if self.stage == LAST:",
            "return cross_entropy(",
        ),
        "layers of another stage": (
            'for i in LAYERS_OF_STAGE["layers"][self.stage]',
            'for i in LAYERS_OF_STAGE["layers"][FIRST]',
            "x = self.layers[str(i)]",
        ),
        "a value of another shape crosses": (
            "example(mesh, 4, SEQ,",
            "example(mesh, 2, SEQ,",
            "def crossing(",
        ),
        "a value of another placement crosses": (
            "placements=[Shard(0)], gradient=[Shard(0)]",
            "placements=[Replicate()], gradient=[Shard(0)]",
            "def crossing(",
        ),
        "a gradient of another placement crosses": (
            "placements=[Shard(0)], gradient=[Shard(0)]",
            "placements=[Shard(0)], gradient=[Replicate()]",
            "def crossing(",
        ),
        "stages along another axis": ('mesh.get_local_rank("pp")', 'mesh.get_local_rank("dp")'),
        "all stages on each rank": (
            'if rank == mesh.get_local_rank("pp")',
            "if rank >= 0",
            "own = [",
        ),
        "FSDP2 over all ranks": ("fully_shard(module, mesh=inner", "fully_shard(module, mesh=mesh"),
        "messages along another axis": (
            'len(STAGE_TO_RANK), mesh, "pp"',
            'len(STAGE_TO_RANK), mesh, "dp"',
        ),
        "another file of rows": ('with_name("schedule.csv")', 'with_name("rows.csv")'),
        "microbatches cut along another dim": ('split={"tokens": 0', 'split={"tokens": 1'),
        "a shared weight that is not summed": ('shared={"wte": (0, 1)}', "shared={}"),
        "forward alone": ("num_tokens, backward=True", "num_tokens, backward=False"),
        "each rank's own norm": ("model.total_norm(gradients)", "total_norm(gradients)"),
    },
    "cut": {
        "a weight that stages of a rank do not share": (
            '    share(stages, "wte")\n',
            "",
            "partial(crossing, inner))",
        ),
        "one layer for all": (
            "stage_layers(lambda: Layer(mesh), 4",
            "stage_layers(lambda: Layer(mesh), 3",
        ),
        "stages that draw in turn": (
            "stage_module(partial(Llama, inner), stage)",
            "partial(Llama, inner)(stage)",
        ),
    },
    "apart": {
        "a coercion that is saved": (
            "with recompute(DTensor.redistribute, n, placements=[Shard(0), Replicate()]) as"
            " n:\n            ",
            "n = n.redistribute(placements=[Shard(0), Replicate()])\n        ",
        ),
        "another placement gathered": (
            "with recompute(DTensor.redistribute, n, placements=[Shard(0), Replicate()]) as n:",
            "with recompute(DTensor.redistribute, n, placements=[Replicate(), Shard(0)]) as n:",
        ),
        "a value that is saved": ("with recompute(silu, ", "with recompute(relu, "),
        "keys that go around twice": ("hops=1", "hops=2"),
        "keys that go nowhere": (", hops=1", ""),
    },
    "plain": {
        "a coercion to another placement": (
            "a = a.redistribute(placements=[Shard(1), Replicate()])",
            "a = a.redistribute(placements=[Shard(1), Shard(0)])",
        ),
        "a coercion along another dim": (
            "x + y.redistribute(placements=[Shard(1), Shard(0)])",
            "x + y.redistribute(placements=[Shard(1), Shard(2)])",
        ),
        "a coercion on another mesh axis": (
            "x + y.redistribute(placements=[Shard(1), Shard(0)])",
            "x + y.redistribute(placements=[Shard(0), Shard(1)])",
        ),
        "a coercion left out": (
            "        m = m.redistribute(placements=[Shard(1), Replicate()])\n",
            "",
            "y = linear(silu(linear(m, self.w_gate))",
        ),
        "a coercion left out of a sum": (
            "return x + y.redistribute(placements=[Shard(1), Shard(0)])",
            "return x + y",
        ),
        "a coercion twice": (
            "label_logit = label_logit.redistribute",
            "label_logit = label_logit.redistribute(placements=[Shard(1),"
            " Replicate()]).redistribute",
        ),
        "a coercion to a sum": (
            "local_max.redistribute(placements=[Shard(1), Replicate()])",
            "local_max.redistribute(placements=[Shard(1), Partial()])",
        ),
        "a coercion of another value": (
            "sum_exp = sum_exp.redistribute",
            "sum_exp = label_logit.redistribute",
            "label_logit = label_logit.redistribute",
        ),
        "coercions in another order": (
            "        n = n.redistribute(placements=[Shard(1), Replicate()])\n        logits ="
            " linear(n, self.head)",
            "        logits = linear(n, self.head).redistribute(placements=[Shard(1),"
            " Replicate()])",
        ),
        "a full tensor": (
            "logits = linear(n, self.head)",
            "logits = linear(n, self.head).full_tensor()",
        ),
        "swapped operands": (
            "linear(a, self.wq)",
            "linear(self.wq, a)",
        ),
        "swapped arguments of attention": (
            "attention(q, k, v, ",
            "attention(q, v, k, ",
        ),
        "another layout": (
            'layout="sbhd"',
            'layout="bshd"',
        ),
        "another eps": (
            "rms_norm(x, self.norm2, eps=1e-5)",
            "rms_norm(x, self.norm2, eps=1e-6)",
        ),
        "another function": (
            "silu(linear(m",
            "rope(linear(m",
        ),
        "another weight": (
            "linear(m, self.w_up)",
            "linear(m, self.w_gate)",
        ),
        "the wrong name of a weight": (
            "linear(m, self.w_up)",
            "linear(m, self.w_upper)",
        ),
        "a sum for a product": (
            "* linear(m, self.w_up)",
            "+ linear(m, self.w_up)",
        ),
        "another view": (
            "linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM))",
            "linear(a, self.wk).unflatten(-1, (HEAD_DIM, -1))",
        ),
        "rotation left out": (
            "rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)",
            "linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM))",
            "y = linear(attention(",
        ),
        "another base of rotary positions": (
            "theta=10_000",
            "theta=20_000",
            "q = rope(",
        ),
        "a table that is placed otherwise": (
            "dtype=torch.float64, placements=[Replicate(), Replicate()]",
            "dtype=torch.float64, placements=[Shard(1), Replicate()]",
            "q = rope(",
        ),
        "one layer less": (
            "for _ in range(LAYERS)",
            "for _ in range(1)",
            "for layer in self.layers",
        ),
        "a loop left out": (
            "        for layer in self.layers:\n            x = layer(x, self.rotary)",
            "        if 1 == 2:\n            x = x",
            "def forward(self, tokens",
        ),
        "another placement of a weight": (
            "self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM, placements=[Replicate(), Shard(1)]",
            "self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM, placements=[Replicate(), Shard(0)]",
        ),
        "a weight over another axis": (
            "self.w_down = weight(mesh, HIDDEN, FFN, placements=[Replicate(), Shard(1)]",
            "self.w_down = weight(mesh, HIDDEN, FFN, placements=[Shard(1), Replicate()]",
        ),
        "another size of a weight": (
            "self.w_up = weight(mesh, FFN,",
            "self.w_up = weight(mesh, HIDDEN,",
        ),
        "other initial values": (
            "HIDDEN, FFN, placements=[Replicate(), Shard(1)], std=0.02)",
            "HIDDEN, FFN, placements=[Replicate(), Shard(1)], std=0.2)",
        ),
        "an initial value left out": (
            "self.norm2 = weight(mesh, HIDDEN, placements=[Replicate(), Replicate()], mean=1.0)",
            "self.norm2 = weight(mesh, HIDDEN, placements=[Replicate(), Replicate()])",
        ),
        "another mesh": (
            'MESH = {"dp": 2, "tp": 2}',
            'MESH = {"dp": 4, "tp": 1}',
        ),
        "axes in another order": (
            'MESH = {"dp": 2, "tp": 2}',
            'MESH = {"tp": 2, "dp": 2}',
        ),
        "another global batch": (
            "SEED = 8, 2, 10, 3",
            "SEED = 8, 4, 10, 3",
        ),
        "another size of a dim": (
            "SEQ = 32, 16, 2, 4, 4, 2, 24, 8",
            "SEQ = 32, 16, 2, 4, 4, 2, 24, 16",
        ),
        "another dtype": (
            ".to(torch.float64)",
            ".to(torch.float32)",
        ),
        "an optimizer setting left out": (
            ", eps=1e-5, weight_decay=0.1)\n    return",
            ", weight_decay=0.1)\n    return",
        ),
        "an optimizer of no parameters": (
            "AdamW(model.parameters(), ",
            "AdamW(model, ",
        ),
        "another optimizer setting": (
            "betas=(0.9, 0.95)",
            "betas=(0.9, 0.99)",
        ),
        "another optimizer": (
            "torch.optim.AdamW(",
            "torch.optim.Adam(",
        ),
        "inputs in another order of dims": (
            "labels, MICROBATCHES, [Shard(1), Replicate()], seq_first=True",
            "labels, MICROBATCHES, [Shard(1), Replicate()], seq_first=False",
        ),
        "a loss that is not divided": (
            "(loss_sum / max(num_tokens, 1)).backward()",
            "loss_sum.backward()",
        ),
        "a loss divided otherwise": (
            "(loss_sum / max(num_tokens, 1)).backward()",
            "(loss_sum / max(num_tokens, 2)).backward()",
        ),
        "gradients that are not reduced": (
            "gradients = reduced_gradients(model)",
            "gradients = [each.grad for each in model.parameters()]",
        ),
        "another limit of the norm": (
            "min(1.0, 1.0 / (",
            "min(1.0, 2.0 / (",
        ),
        "clipping left out": (
            "            gradient.mul_(min(1.0, 1.0 / (grad_norm.item() + 1e-6)))",
            "            gradient.square()",
        ),
        "an update of steps that are not finite": (
            "if num_tokens and loss.isfinite() and grad_norm.isfinite()",
            "if num_tokens and loss.isfinite()",
        ),
        "gradients that are kept": (
            "    optimizer.zero_grad()\n",
            "",
        ),
        "evaluation with gradients": (
            "@torch.no_grad()\n",
            "",
        ),
        "evaluation of a mean of means": (
            "for tokens, labels in batch]) / max(num_tokens, 1)",
            "for tokens, labels in batch]) / len(batch)",
        ),
        "another sum of losses": (
            "whole_sum(losses)",
            "sum(losses)",
        ),
        "another mesh of a run": (
            "start_run(MESH)",
            'start_run({"dp": 4})',
        ),
        "other rows of a run": (
            "rows[:, 1:])",
            "rows[:, :-1])",
        ),
        "another seed": (
            "torch.manual_seed(SEED)",
            "torch.manual_seed(0)",
        ),
        "an import of another name": (
            "from torch.nn.functional import silu",
            "from torch.nn.functional import gelu as silu",
        ),
        "an import left out": (
            "from torch.distributed.tensor import Replicate, Shard\n",
            "from torch.distributed.tensor import Shard\n",
            "self.wte = weight(",
        ),
        "an import of the run left out": (
            "import torch.distributed as dist\n",
            "",
            "def main(",
        ),
        "a function of the library left out": (
            "        whole_sum,\n",
            "",
            "loss = whole_sum(losses)",
        ),
        "a function of the library for another": (
            "        rms_norm,\n",
            "        layer_norm as rms_norm,\n",
        ),
        "a function that the library lacks": (
            "        rms_norm,\n",
            "        rms_norm,\n        run_command,\n",
        ),
        "another library": (
            "from torch_ops import",
            "from torch_opts import",
        ),
        "something else where the library is missing": (
            'sys.exit(f"error: {error}: copy',
            'sys.stderr.write(f"error: {error}: copy',
        ),
        "a module that no program imports": (
            "import math\n",
            "import math\nimport subprocess\n",
        ),
        "a name bound twice": (
            "MESH = {",
            "VOCAB = 32\nMESH = {",
        ),
        "a hook": (
            "    model = Llama(mesh)",
            "    torch.set_num_threads(1)\n    model = Llama(mesh)",
        ),
    },
    "sharded": {
        "a residual left out": (
            "return x + linear(",
            "return linear(",
            "for layer in self.layers",
        ),
        "labels for tokens": (
            "embedding(tokens, self.wte)",
            "embedding(labels, self.wte)",
        ),
        "layers that are not recomputed": (
            "x = recomputed(layer, x, self.rotary)",
            "x = layer(x, self.rotary)",
            "a = rms_norm(",
        ),
        "FSDP2 over another axis": (
            'DataParallelMeshDims(shard="dp", replicate="replica")',
            'DataParallelMeshDims(shard="replica", replicate="dp")',
        ),
        "FSDP2 without replicas": (
            'DataParallelMeshDims(shard="dp", replicate="replica")',
            'DataParallelMeshDims(shard="dp")',
        ),
        "parameters that stay gathered": (
            "reshard_after_forward=True",
            "reshard_after_forward=False",
        ),
        "the model left unsharded": (
            "for module in [model]:",
            "for module in model.layers:",
        ),
        "mean for sum": (
            "        sum_gradients(module)\n    for",
            "    for",
            "for module in model.layers",
        ),
        "another weight decay": (
            "weight_decay=0.3",
            "weight_decay=0.2",
        ),
        "another share of the learning rate": (
            "lr_scale=0.5",
            "lr_scale=0.25",
        ),
        "a parameter in another group": (
            '"layers.*.norm1", "layers.*.norm2", "norm"',
            '"layers.*.norm1", "layers.*.norm2"',
        ),
        "the wrong name of a parameter": (
            'model, "layers.*.wq"',
            'model, "layers.*.w_q"',
        ),
        "inputs placed otherwise": (
            "tokens, MICROBATCHES, [Shard(0), Shard(0)]",
            "tokens, MICROBATCHES, [Shard(0), Replicate()]",
        ),
        "parameters freed in each microbatch": (
            "free=number == len(batch))",
            "free=True)",
        ),
    },
    "hidden": {
        "I to R left out": (
            "        a = a.redistribute(placements=[Shard(0), Replicate()])",
            "        a = a",
            "q = rope(",
        ),
        "other layers recomputed": (
            "i % 2 == 0",
            "i % 2 == 1",
        ),
        "another momentum": (
            "momentum=0.9",
            "momentum=0.8",
        ),
    },
    "narrow": {
        "another precision of parameters": (
            "param_dtype=torch.bfloat16",
            "param_dtype=torch.float32",
            "fully_shard(",
        ),
        "another precision of sums": (
            "reduce_dtype=torch.float32",
            "reduce_dtype=torch.bfloat16",
            "fully_shard(",
        ),
    },
    "named": {
        "sums after each microbatch": (
            "reduce_now=True",
            "reduce_now=number == len(batch)",
        ),
        "another learning rate": (
            "* 0.5 * (1 + math.cos",
            "* 0.4 * (1 + math.cos",
        ),
        "another warm-up": (
            "if step < 5:",
            "if step < 6:",
        ),
        "the wrong name of a tensor": (
            "model.embed_tokens.weight",
            "lm_head.weight",
        ),
    },
}
"""By the case: a part of its text, what replaces it, and the line that is refused, if it is not
that one.
"""


def statement_at(text: str, line: int) -> int:
    """The first line of the innermost statement that has a line; a function without one is not
    the whole of it.
    """
    every = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt))
    return max(
        (node.lineno for node in every if node.lineno <= line <= (node.end_lineno or 0)),
        default=line,
    )


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    ("plan", "what"), [(plan, what) for plan, edits in PLANTED.items() for what in edits]
)
def test_a_planted_edit_is_refused_at_its_line(plan: str, what: str) -> None:
    text, program = compiled(plan)
    old, new, *at = PLANTED[plan][what]
    assert text.count(old) > 0
    edited = text.replace(old, new, 1)
    with pytest.raises(AssertionError, match=r"emit: line \d+: ") as caught:
        check(edited, program)
    line = int(str(caught.value).split()[2].rstrip(":"))
    changed = next(
        i
        for i, (a, b) in enumerate(zip(text.split("\n"), edited.split("\n"), strict=False), 1)
        if a != b
    )
    expected = edited[: edited.index(at[0])].count("\n") + 1 if at else changed
    assert statement_at(edited, line) == statement_at(edited, expected), caught.value


def test_planted_edits_are_of_many_kinds() -> None:
    assert sum(map(len, PLANTED.values())) >= 40


@pytest.mark.parametrize("plan", CASES)
def test_a_program_is_read_back(plan: str) -> None:
    text, program = compiled(plan)
    assert check(text, program) == len(program.ops)


OTHER_WORDS = {
    "other names": (
        " n = ",
        " z = ",
        "= n.redistribute",
        "= z.redistribute",
        "linear(n, ",
        "linear(z, ",
    ),
    "sizes by number": ("weight(mesh, HIDDEN, ", "weight(mesh, 16, "),
    "a line for two": (
        "        m = m.redistribute(placements=[Shard(1), Replicate()])\n",
        "        n = m\n        m = n.redistribute(placements=[Shard(1), Replicate()])\n",
    ),
    "settings in another order": ("betas=(0.9, 0.95), eps=1e-5", "eps=1e-5, betas=(0.9, 0.95)"),
    "another name in a step": ("grad_norm", "norm"),
}
"""Of `plain`: what is there, what replaces it, and more such pairs."""


@pytest.mark.parametrize("what", OTHER_WORDS)
def test_the_same_program_in_other_words_is_accepted(what: str) -> None:
    text, program = compiled("plain")
    edited = replace_all(text, *OTHER_WORDS[what])
    assert check(edited, program) == len(program.ops)


@pytest.mark.long
@pytest.mark.parametrize("plan", CASES)
@pytest.mark.parametrize("mutants", KINDS)
def test_every_mutant_is_refused_at_a_line(
    mutants: Callable[[ast.Module], Iterator[str]], plan: str
) -> None:
    """A third of them."""
    text, program = compiled(plan)
    tree = ast.parse(text)
    assert not survivors(
        islice(mutants(tree), 0, None, 3), tree, lambda edited: check(edited, program)
    )
