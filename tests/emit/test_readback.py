"""The read-back check accepts what is emitted, and nothing that does anything else."""

import ast
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest

from helpers.readback_plans import PLANS, SMALL, compiled, demand_rejected
from scalec.compiler.emit.readback import check


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", [*SMALL, *(path.stem for path in sorted(PLANS.glob("*.scale")))])
def test_what_is_emitted_is_accepted_and_does_every_op(name: str) -> None:
    text, program = compiled(name)
    assert check(text, program) == len(program.ops)


def test_comments_docstrings_and_layout_do_not_matter() -> None:
    text, program = compiled("tiny_llama")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
    assert check(ast.unparse(tree), program) == check(text, program)


LOOP = "        for layer in self.layers:\n"
WO = "self.wo = weight(mesh, HIDDEN, HEADS * HEAD_DIM"
SAVED = """n = all_gather(n, self.tp, dim=0)
        logits = linear(n, self.head)"""
REGATHERED = """with regather(n, self.tp, dim=0) as n:
            logits = linear(n, self.head)"""

BY_HAND = {
    # plan, code as `ast.unparse` writes it, what replaces it
    "a reduce-scatter is left out": (
        "tiny_llama",
        "x + reduce_scatter(y, self.tp, dim=0)",
        "x + y",
    ),
    "a reduce-scatter becomes an all-reduce": (
        "tiny_llama",
        "reduce_scatter(y, self.tp, dim=0)",
        "all_reduce(y, self.tp)",
    ),
    "q and k are swapped": ("tiny_llama", "attention(q, k, v", "attention(k, q, v"),
    "v in the place of k": ("tiny_llama", "attention(q, k, v", "attention(q, v, v"),
    "another weight": ("tiny_llama", "linear(a, self.wk)", "linear(a, self.wv)"),
    "weights are swapped": (
        "tiny_llama",
        "silu(linear(m, self.w_gate)) * linear(m, self.w_up)",
        "silu(linear(m, self.w_up)) * linear(m, self.w_gate)",
    ),
    "a gather along another dim": (
        "tiny_llama",
        "all_gather(a, self.tp, dim=0)",
        "all_gather(a, self.tp, dim=1)",
    ),
    "a gather with another backward": (
        "tiny_llama",
        "all_gather(a, self.tp, dim=0)",
        "all_gather_invariant(a, self.tp, dim=0)",
    ),
    "a gather for a block, which backward repeats": ("sequence parallel", SAVED, REGATHERED),
    "a gather that is saved": ("regather", REGATHERED, SAVED),
    "layers that are saved": ("full", "recomputed(layer, x, self.rotary)", "layer(x, self.rotary)"),
    "every layer recomputed": ("every", ", enabled=enabled)", ")"),
    "other layers recomputed": ("every", "i % 2 == 0", "i % 2 == 1"),
    "more layers recomputed": ("every", "i % 2 == 0", "i % 1 == 0"),
    "layers recomputed of as many as there are not": (
        "every",
        "for i in range(",
        "for i in range(1",
    ),
    "layers recomputed": ("regather", "layer(x, self.rotary)", "recomputed(layer, x, self.rotary)"),
    "an op that is kept": (
        "selective",
        "with recompute(silu, linear(m, self.w_gate)) as g:\n            y",
        "g = silu(linear(m, self.w_gate))\n        y",
    ),
    "another op recomputed": ("selective", "recompute(silu, ", "recompute(relu, "),
    "a reader outside its block": ("regather", "            v = linear(a", "        v = linear(a"),
    "a sum before another": (
        "tiny_llama",
        "        sum_exp = all_reduce(sum_exp, self.tp)\n        label_logit ="
        " all_reduce(label_logit, self.tp)",
        "        label_logit = all_reduce(label_logit, self.tp)\n        sum_exp ="
        " all_reduce(sum_exp, self.tp)",
    ),
    "a run without a name": ("tiny_llama", "name='tiny_llama'", "name=None"),
    "another group of ranks": (
        "tiny_llama",
        "self.tp = mesh.axis('tp')",
        "self.tp = mesh.axis('dp')",
    ),
    "a sum for the maximum": ("tiny_llama", ", op='max'", ""),
    "another eps": (
        "tiny_llama",
        "rms_norm(x, self.norm2, eps=1e-05)",
        "rms_norm(x, self.norm2, eps=1e-06)",
    ),
    "another norm": ("tiny_llama", "rms_norm(x, self.norm2,", "rms_norm(x, self.norm1,"),
    "another theta": ("tiny_llama", "theta=500000", "theta=10000"),
    "positions for fewer dims": ("tiny_llama", "seq_dim=-4", "seq_dim=-3"),
    "a shorter table": (
        "tiny_llama",
        "rope_frequencies(SEQ, HEAD_DIM",
        "rope_frequencies(64, HEAD_DIM",
    ),
    "the sequence elsewhere": (
        "tiny_llama",
        "attention(q, k, v, layout='sbhd')",
        "attention(q, k, v)",
    ),
    "other sizes of a view": (
        "tiny_llama",
        "self.wq).unflatten(-1, (-1, HEAD_DIM))",
        "self.wq).unflatten(-1, (-1, 8))",
    ),
    "no view": ("tiny_llama", "layout='sbhd').flatten(-2)", "layout='sbhd')"),
    "a weight's split": ("tiny_llama", f"{WO}, shard={{1:", f"{WO}, shard={{0:"),
    "a weight whole": ("tiny_llama", f"{WO}, shard={{1: 'tp'}}", WO),
    "a weight's shape": (
        "tiny_llama",
        "(mesh, KV_HEADS * HEAD_DIM,",
        "(mesh, KV_HEADS + HEAD_DIM,",
    ),
    "a weight of other dims": ("tiny_llama", "(mesh, FFN, HIDDEN,", "(mesh, HIDDEN, FFN,"),
    "another size": ("tiny_llama", ", FFN, SEQ = (256, 64, ", ", FFN, SEQ = (256, 32, "),
    "a size of another name": ("tiny_llama", "VOCAB, HIDDEN, LAYERS", "HIDDEN, VOCAB, LAYERS"),
    "a size as a power": ("tiny_llama", ", FFN, SEQ = (256, 64, ", ", FFN, SEQ = (2 ** 8, 64, "),
    "a size less": ("tiny_llama", "2, 192, 128)\n", "2, 192)\n"),
    "a size bound anew": ("tiny_llama", LOOP, f"        HIDDEN = 32\n{LOOP}"),
    "a size for an argument": ("tiny_llama", "x: Tensor, rotary", "HIDDEN: Tensor, rotary"),
    "a size that is not there": (
        "tiny_llama",
        "weight(mesh, HIDDEN, init",
        "weight(mesh, WIDTH, init",
    ),
    "sizes behind their use": ("tiny_llama", "class Layer(nn", "PLAN = VOCAB\n\nclass Layer(nn"),
    "sizes twice": ("tiny_llama", "class Layer(nn", "SEQ = 128\n\nclass Layer(nn"),
    "a weight's first values": (
        "tiny_llama",
        "self.norm2 = weight(mesh, HIDDEN, init=ones())",
        "self.norm2 = weight(mesh, HIDDEN, init=zeros())",
    ),
    "a weight's distribution": ("tiny_llama", "normal(0.02)", "normal(0.2)"),
    "more layers": ("tiny_llama", "range(LAYERS)", "range(3)"),
    "the layers again": (
        "tiny_llama",
        "for layer in self.layers:",
        "for layer in [*self.layers, *self.layers]:",
    ),
    "the bucket's axis": (
        "tiny_llama",
        "all_reduce_(gradients['vectors'], dp_tp)",
        "all_reduce_(gradients['vectors'], dp)",
    ),
    "the other bucket": (
        "tiny_llama",
        "sum_squares(gradients['vectors'])",
        "sum_squares(gradients['matrices'])",
    ),
    "a bucket twice": (
        "tiny_llama",
        "    grad_norm = (",
        "    all_reduce_(gradients['vectors'], dp_tp)\n    grad_norm = (",
    ),
    "the count again": (
        "tiny_llama",
        "    inv_num_tokens = ",
        "    all_reduce_(num_tokens, dp)\n    inv_num_tokens = ",
    ),
    "the model twice": (
        "tiny_llama",
        "loss_sum = model(tokens, labels)",
        "loss_sum = model(tokens, labels) + model(tokens, labels)",
    ),
    "across documents": ("documents", "layout='sbhd', documents=documents)", "layout='sbhd')"),
    "tokens for documents": ("documents", "layer(x, documents,", "layer(x, tokens,"),
    "inputs in another order": (
        "documents",
        "for tokens, labels, documents in",
        "for tokens, documents, labels in",
    ),
    "an input left out": ("documents", "for tokens, labels, documents in", "for tokens, labels in"),
    "another separator": ("documents", "separator=10", "separator=11"),
    "fewer masks": ("masked", "masked=0.15", "masked=0.1"),
    "another mask": ("masked", "mask_token=3", "mask_token=4"),
    "no masks": ("masked", ", masked=0.15, mask_token=3", ""),
    "attention back only": ("masked", "causal=False", "causal=True"),
    "inputs swapped": (
        "tiny_llama",
        "loss_sum = model(tokens, labels)",
        "loss_sum = model(labels, tokens)",
    ),
    "no backward": ("tiny_llama", "        (loss_sum * inv_num_tokens).backward()\n", ""),
    "a mean over ranks": (
        "tiny_llama",
        "(loss_sum * inv_num_tokens)",
        "(loss_sum / 2 * inv_num_tokens)",
    ),
    "another share": ("tiny_llama", "(loss_sum * inv_num_tokens)", "(loss_sum * num_tokens)"),
    "no clamp": ("tiny_llama", ".clamp(min=1)", ""),
    "the share in another dtype": ("tiny_llama", ".to(torch.float32)", ".to(torch.float64)"),
    "the loss not averaged": (
        "tiny_llama",
        "all_reduce_(loss, dp) * inv_num_tokens",
        "all_reduce_(loss, dp)",
    ),
    "no clipping": ("tiny_llama", "clip_scale(grad_norm, 1.0)", "torch.ones_like(grad_norm)"),
    "another limit": ("tiny_llama", "clip_scale(grad_norm, 1.0)", "clip_scale(grad_norm, 2.0)"),
    "never skipped": ("tiny_llama", "skip=num_tokens == 0", "skip=num_tokens == -1"),
    "no root": ("tiny_llama", ").sqrt()", ")"),
    "a bucket without a weight": ("tiny_llama", "'layers.*.wk', ", ""),
    "a weight in another bucket": (
        "tiny_llama",
        "ParamGroup('layers.*.norm1',",
        "ParamGroup('layers.*.wk', 'layers.*.norm1',",
    ),
    "a weight renamed": ("tiny_llama", "'layers.*.wk'", "'layers.*.wx'"),
    "a wider pattern": ("tiny_llama", "'layers.*.wk'", "'*.wk'"),
    "another decay": ("tiny_llama", "weight_decay=0.1", "weight_decay=0.0"),
    "a group's own settings": ("groups", "lr_scale=2.0", "lr_scale=1.0"),
    "another optimizer": ("tiny_llama", "betas=(0.9, 0.95)", "betas=(0.9, 0.999)"),
    "masters in another dtype": ("kv heads fewer", "master=torch.float32", "master=torch.bfloat16"),
    "no loss scale": ("fp16", "(loss_sum * inv_num_tokens * scale)", "(loss_sum * inv_num_tokens)"),
    "the loss scale twice": (
        "fp16",
        "(loss_sum * inv_num_tokens * scale)",
        "(loss_sum * inv_num_tokens * scale * scale)",
    ),
    "an update by scaled gradients": (
        "fp16",
        "clip_scale(grad_norm, 1.0) / scale",
        "clip_scale(grad_norm, 1.0)",
    ),
    "an update by scaled gradients, unclipped": ("fp16, unclipped", "scale=1 / scale, ", ""),
    "a norm of scaled gradients": ("fp16", ".sqrt() / scale", ".sqrt()"),
    "values that are not finite": ("tiny_llama", ", finite=finite)", ")"),
    "a loss that is not finite": ("tiny_llama", "loss.isfinite() & grad_norm", "grad_norm"),
    "a norm that is not finite": ("tiny_llama", " & grad_norm.isfinite()", ""),
    "one of two that is finite": ("tiny_llama", "loss.isfinite() &", "loss.isfinite() |"),
    "spikes": ("spikes", ", finite=usual)", ", finite=finite)"),
    "spikes that are told alone": ("spikes", "usual = finite & (loss <= limit)", "usual = finite"),
    "spikes alone": ("spikes", "finite & (loss <= limit)", "loss <= limit"),
    "all but spikes": ("spikes", "(loss <= limit)", "(loss > limit)"),
    "spikes of the norm": ("spikes", "(loss <= limit)", "(grad_norm <= limit)"),
    "another limit on losses": ("spikes", "loss_limit(8.0)", "loss_limit(9.0)"),
    "a limit that is not told": ("spikes", ", limit=limit)", ")"),
    "a loss that is no number, in float16": (
        "spikes, fp16",
        "loss.isfinite() & (loss <= limit)",
        "loss <= limit",
    ),
    "a loss that is not finite in float16": ("fp16", ", finite=loss.isfinite()", ""),
    "an overflow that is not seen": ("fp16", ", overflow=~grad_norm.isfinite()", ""),
    "an overflow that is another's": ("fp16", "~grad_norm.isfinite()", "~loss.isfinite()"),
    "an overflow that is no infinity": ("fp16", "~grad_norm.isfinite()", "~grad_norm.isnan()"),
    "all but overflows": ("fp16", "~grad_norm.isfinite()", "grad_norm.isfinite()"),
    "sums in the state's dtype": ("fp16", ", dtype=torch.bfloat16)", ")"),
    "sums in another dtype": ("fp16", ", dtype=torch.bfloat16)", ", dtype=torch.float16)"),
    "more microbatches": ("tiny_llama", "microbatches=2", "microbatches=4"),
    "another mesh": ("tiny_llama", "'tp': 2}", "'tp': 4}"),
    "inputs laid out otherwise": ("tiny_llama", "Input(('seq', 'batch')", "Input(('batch', 'seq')"),
    "an import more": ("tiny_llama", "import torch\n", "import torch\nimport sys\n"),
    "an import under a name": ("tiny_llama", "rope, ", "rope as rope, "),
    "a function under another's name": ("tiny_llama", "linear, silu", "linear, relu as silu"),
    "a call of the system": ("tiny_llama", LOOP, f"        os.system('true')\n{LOOP}"),
    "a statement in the module": ("tiny_llama", "PLAN = Plan(", "print()\nPLAN = Plan("),
    "a default that is computed": ("tiny_llama", "rotary: Tensor)", "rotary: Tensor = print())"),
    "an annotation that is computed": ("tiny_llama", "rotary: Tensor)", "rotary: print())"),
    "a decorator": ("tiny_llama", "def train_step", "@torch.no_grad()\ndef train_step"),
    "a method more": (
        "tiny_llama",
        "class Llama(",
        "    def extra(self) -> None: ...\n\n\nclass Llama(",
    ),
    "a name that hides a function": (
        "tiny_llama",
        "        a = rms_norm",
        "        linear = x\n        a = rms_norm",
    ),
    "the plan twice": ("tiny_llama", "\nif __name__", "\nPLAN = None\nif __name__"),
    "no Python": ("tiny_llama", "import torch\n", "import import\n"),
    "a result without its sum": (
        "tiny_llama",
        "return x + reduce_scatter(",
        "return reduce_scatter(",
    ),
    "another loss": ("tiny_llama", "return token_loss(sum_exp, ", "return token_loss(logits_max, "),
    "a result alone": ("tiny_llama", "return x + reduce_scatter(y, self.tp, dim=0)", "return x"),
    "another kernel": ("fused", "rms_norm = RMSNorm(TILES", "rms_norm = AddRMSNorm(TILES"),
    "the tiles of another kernel": (
        "fused",
        "RMSNorm(TILES['RMSNorm']",
        "RMSNorm(TILES['AddRMSNorm']",
    ),
    "tiles of one's own": ("fused", "RMSNorm(TILES['RMSNorm'])", "RMSNorm({64: 1})"),
    "another file of tiles": ("fused", "'tiles.json'", "'tile.json'"),
    "the optimizer's tile": ("fused", "tile=TILES['AdamW']", "tile=TILES['RMSNorm']"),
    "logits in other chunks": ("fused", "chunk=4096", "chunk=2048"),
    "no kernel": ("fused", "rms_norm = RMSNorm(", "norm = RMSNorm("),
    "the other gate": ("fused", "gelu_mul(gate, up)", "gelu_mul(up, gate)"),
    "a sum of one term": (
        "fused",
        "add_rms_norm(x, y, self.norm2",
        "add_rms_norm(y, y, self.norm2",
    ),
    "another sum's norm": (
        "fused",
        "add_rms_norm(x, y, self.norm2, eps=1e-05)",
        "add_rms_norm(x, y, self.norm1, eps=1e-05)",
    ),
    "products of other weights": (
        "fused",
        "fused_linear(a, self.wq, self.wk",
        "fused_linear(a, self.wq, self.wv",
    ),
    "weights of one product in another order": (
        "fused",
        "('layers.*.wq', 'layers.*.wk'",
        "('layers.*.wk', 'layers.*.wq'",
    ),
    "weights of one product apart": (
        "fused",
        "('layers.*.w_gate', 'layers.*.w_up')",
        "'layers.*.w_gate', 'layers.*.w_up'",
    ),
    "products of another value": ("fused", "fused_linear(m, ", "fused_linear(x, "),
    "results of another shape": ("fused", "into=((-1, HEAD_DIM),", "into=((HEAD_DIM, -1),"),
    "another result apart": ("fused", "apart=(2,)", "apart=(1,)"),
    "queries turned alone": ("fused", "rope_pair(q, k, ", "rope_pair(q, q, "),
    "another smoothing": ("fused", "self.tp, smoothing=0.1)\n", "self.tp, smoothing=0.2)\n"),
    "parts of all classes": (
        "fused",
        "linear_softmax_stats(n, self.head, labels, self.tp",
        "linear_softmax_stats(n, self.head, labels",
    ),
    "parts that are not rescale_to_global_max": (
        "fused",
        "rescale_to_global_max(local_max, sum_exp, label_logit, logits_max,",
        "rescale_to_global_max(logits_max, sum_exp, label_logit, local_max,",
    ),
    "as many classes elsewhere": ("fused", "columns=VOCAB // 2", "columns=VOCAB"),
    "another cap": ("fused, vocabulary whole", "cap=30.0", "cap=31.0"),
    "no z-loss": ("fused, vocabulary whole", "z=0.01, ", ""),
    "the head's other operand": (
        "fused, vocabulary whole",
        "linear_cross_entropy(n, self.wte",
        "linear_cross_entropy(x, self.wte",
    ),
    "no bias": ("fused, bias", "bias=self.b_head, ", ""),
    "another bias": ("fused, bias, vocabulary whole", "bias=self.b_head", "bias=self.norm"),
    "parts of all logits": (
        "fused, two losses",
        "logit_softmax_stats(y, labels, self.tp",
        "logit_softmax_stats(y, labels",
    ),
    "a function without its attribute": (
        "fused, two losses",
        "softcap(linear(n, self.wte), cap=20.0)",
        "softcap(linear(n, self.wte))",
    ),
    "another attribute of a function": (
        "fused, two losses",
        "softcap(linear(n, self.wte), cap=20.0)",
        "softcap(linear(n, self.wte), cap=30.0)",
    ),
    "padding among the classes": (
        "fused, two losses",
        "classes=61, smoothing=0.1)",
        "smoothing=0.1)",
    ),
    "another cap of logits": ("fused, two losses", "cap=30.0", "cap=31.0"),
    "no cap of whole logits": ("fused, logits capped alone", ", cap=30.0", ""),
    "a captured value stands for the carried": ("captured", "x = layer(x, y,", "x = layer(y, y,"),
    "a loop that begins otherwise": ("two carried", "x, y = layer(x, y,", "x, y = layer(y, x,"),
    "a class compiled that is not innermost": (
        "compiled, nested",
        "compile_each(model, ",
        "compile_each(model, Small, ",
    ),
    "nothing compiled": ("compiled", "    compile_each(model, Block, Layer)\n", ""),
    "only one class compiled": (
        "compiled",
        "compile_each(model, Block, Layer)",
        "compile_each(model, Layer)",
    ),
    "another way to compile": (
        "compiled",
        "compile_each(model, ",
        "compile_each(model, backend='eager', ",
    ),
    "results swapped": ("two carried", "return (x, y)", "return (y, x)"),
}


@pytest.mark.sample(45)
@pytest.mark.parametrize("what", BY_HAND)
def test_another_program_is_rejected(what: str) -> None:
    demand_rejected(*BY_HAND[what])


# ---- every mutant of a kind


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        body: list[ast.stmt] | None = getattr(node, "body", None)
        if isinstance(body, list):
            yield body


def _is_docstring(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)


def _without_a_statement(tree: ast.Module) -> Iterator[str]:
    for body in list(_bodies(tree)):
        for i, stmt in enumerate(list(body)):
            if not _is_docstring(stmt):
                whole = list(body)
                del body[i]
                yield f"without `{ast.unparse(stmt)[:60]}`"
                body[:] = whole


def _with_a_statement_twice(tree: ast.Module) -> Iterator[str]:
    for body in list(_bodies(tree)):
        for i, stmt in enumerate(list(body)):
            if not _is_docstring(stmt):
                body.insert(i, stmt)
                yield f"twice `{ast.unparse(stmt)[:60]}`"
                del body[i]


def _with_another_constant(tree: ast.Module) -> Iterator[str]:
    docstrings = {
        id(stmt.value) for body in _bodies(tree) for stmt in body if isinstance(stmt, ast.Expr)
    }
    run = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "name"
    }
    # a run is called as the plan's file, which is no part of the program
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings | run:
            continue
        match node.value:
            case bool(value):
                other: bool | int | float | str = not value
            case int(value) | float(value):
                other = value + 1
            case str(value):
                other = f"{value}_"
            case _:
                continue
        node.value = other
        yield f"`{other}` for `{value}` in line {node.lineno}"
        node.value = value


def _with_another_name(tree: ast.Module) -> Iterator[str]:
    """Each name that a function reads, exchanged for the name that it reads next."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        read = [
            n
            for stmt in function.body
            for n in ast.walk(stmt)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        ]
        for node, other in pairwise(read):
            if node.id != other.id:
                name, node.id = node.id, other.id
                yield f"`{other.id}` for `{name}` in line {node.lineno}"
                node.id = name


def _with_arguments_swapped(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        alike = isinstance(node, ast.Call) and ast.unparse(node.func) == "ParamGroup"
        if isinstance(node, ast.Call) and len(node.args) > 1 and not alike:
            node.args[:2] = reversed(node.args[:2])
            if ast.dump(node.args[0]) != ast.dump(node.args[1]):
                yield f"arguments swapped in `{ast.unparse(node)}`"
            node.args[:2] = reversed(node.args[:2])


KINDS = [
    _without_a_statement,
    _with_a_statement_twice,
    _with_another_constant,
    _with_another_name,
    _with_arguments_swapped,
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(
    "plan", ["parallel block", "zero 3", "fp16", "fused", "fused, bias", "fused, two losses"]
)
@pytest.mark.parametrize("mutants", KINDS)
def test_every_mutant_is_rejected(
    mutants: Callable[[ast.Module], Iterator[str]], plan: str, part: int
) -> None:
    """Of three mutants one."""
    text, program = compiled(plan)
    tree = ast.parse(text)
    survivors: list[str] = []
    for what in islice(mutants(tree), part, None, 3):
        try:
            check(ast.unparse(tree), program)
            survivors.append(what)
        except AssertionError:
            pass
    assert not survivors
