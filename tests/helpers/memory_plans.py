"""Plans that the account is held to measurements on: every op, placement and element type, at
tiny sizes.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from helpers.oracle.models import MODELS, SIZES, Model
from helpers.oracle.plans import Case, plan_text, train_text
from helpers.programs import import_module, write_files
from helpers.unary_ops import UNARY, make_call
from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"

ONE = Case()
SP = Case(dp=2, tp=2, sp=True, microbatches=2)
CASES = {
    "one rank": ONE,
    "one rank, padded": replace(ONE, padded=True),
    "one rank, smoothed": replace(ONE, smoothing=0.1),
    "one rank, every op": replace(ONE, model="every", kv=4, optimizer="momentum"),
    "tensor": Case(dp=2, tp=2, vocab=False),
    "sequence": SP,
    "gathered again": replace(SP, gathered="regather"),
    "padded, z-loss": replace(SP, padded=True, smoothing=0.1, z=0.01),
    "every op": replace(SP, model="every", kv=4, optimizer="adamw"),
    "tied": replace(SP, model="tied"),
    "shared state": replace(SP, state="zero 1 over dp", optimizer="adamw"),
    "layers": replace(SP, state="bucket = 1KiB"),
    "layers of shared state": replace(
        SP, state="zero 1 over dp  bucket = 1KiB", optimizer="momentum"
    ),
    "shared gradients": replace(SP, state="zero 2 over dp", optimizer="adamw"),
    "shared weights": replace(SP, state="zero 3 over dp", optimizer="adamw"),
    "shared weights in small buckets": replace(
        SP, state="zero 3 over dp  bucket = 1KiB  prefetch = 3", model="every", kv=4
    ),
    "shared weights, whole gradients": replace(
        SP, state="parameters, optimizer over dp", optimizer="adamw"
    ),
    "shared weights over a part of data ranks": Case(
        dp=2, replicas=2, microbatches=2, state="zero 3 over dp", optimizer="adamw"
    ),
    "shared weights, layers again": replace(SP, state="zero 3 over dp", recompute="full"),
    "shared weights, gathered again": replace(SP, state="zero 3 over dp", gathered="regather"),
    "shared gradients, ops again": replace(
        SP, state="zero 2 over dp", recompute="selective(attention, rmsnorm, silu)"
    ),
    "layers again": replace(SP, recompute="full"),
    "fused, one rank": replace(ONE, kernels="triton"),
    "fused, tied": replace(SP, vocab=False, model="tied", kernels="triton", optimizer="adamw"),
    "fused, every op": replace(ONE, model="every", kv=4, kernels="triton"),
    "fused, z-loss": replace(ONE, padded=True, smoothing=0.1, z=0.01, kernels="triton"),
    "fused, sequence": replace(
        SP, padded=True, smoothing=0.1, z=0.01, kernels="triton", state="bucket = 1KiB"
    ),
    "fused, shared weights": replace(SP, state="zero 3 over dp", kernels="triton"),
    "fused, layers again": replace(SP, recompute="full", kernels="triton"),
    "fused, ops again": replace(
        SP,
        vocab=False,
        recompute="selective(attention, rmsnorm, silu, cross_entropy)",
        kernels="triton",
    ),
    "ops again": replace(SP, recompute="selective(attention, rmsnorm, silu)"),
    "keys gathered": Case(cp=2, tp=2, sp=True, how="as zigzag"),
    "keys gathered for contiguous parts": Case(cp=4, gathered="regather", kv=1),
    "keys gathered, fused": Case(cp=2, how="as zigzag", kernels="triton", state="zero 1 over cp"),
    "latent": replace(ONE, model="latent"),
    "latent, fused": replace(SP, model="latent", kernels="triton"),
    "latent, keys gathered": Case(cp=2, how="as zigzag", model="latent", kernels="triton"),
    "latent, ring": Case(cp=2, how="as zigzag via ring", model="latent"),
    "ring": Case(cp=4, how="as zigzag via ring", kv=1, state="zero 3 over cp"),
    "ring, fused": Case(cp=2, tp=2, sp=True, how="via ring", kernels="triton"),
    "heads exchanged": Case(uly=4, kv=2, microbatches=2),
    "ops and gathers again": replace(SP, recompute="selective(rmsnorm, silu)", gathered="regather"),
    "experts": replace(ONE, model="two"),
    "experts of all axes": replace(SP, model="sigmoid", experts="dp, tp"),
    "experts, whole tokens": Case(tp=2, model="one", experts="tp"),
    "experts, split within": Case(
        dp=2, tp=2, model="groups", experts="dp", inner=True, state="zero 1 over dp"
    ),
    "experts, rows again": replace(
        SP, model="two", experts="dp, tp", recompute="selective(dispatch)"
    ),
    "experts, layers again": replace(SP, model="two", experts="dp, tp", recompute="full"),
    "experts, fused": replace(SP, model="two", experts="dp, tp", kernels="triton"),
    "experts with losses": replace(ONE, model="losses"),
    "experts with a loss of all layers": replace(ONE, model="all layers"),
    "experts with a loss of all layers, sequence": replace(
        SP, model="all layers, sigmoid", experts="dp, tp"
    ),
    "experts with a loss of all layers, layers again": replace(
        SP, model="all layers", recompute="full"
    ),
    "experts of parts of a sequence, with losses": replace(SP, model="losses", experts="dp, tp"),
    "experts with losses, layers again": replace(ONE, model="losses", recompute="full"),
    "experts of parts of a sequence, with losses, layers again": replace(
        SP, model="losses", experts="dp, tp", recompute="full"
    ),
    "experts of a capacity, layers again": Case(
        dp=2, cp=2, how="as zigzag", model="capacity", experts="dp, cp", recompute="full"
    ),
    "experts of a capacity": Case(dp=2, cp=2, how="as zigzag", model="capacity", experts="dp, cp"),
    "experts, padded": replace(SP, model="roomy", experts="dp, tp", bounded=True),
    "experts, padded, split within": replace(
        SP, model="capacity", experts="dp", inner=True, bounded=True
    ),
    "experts, padded, again": Case(
        tp=2, model="roomy", experts="tp", bounded=True, recompute="selective(dispatch)"
    ),
}

DROPS = """model drops(tokens[batch, seq], labels[batch, seq], documents[batch, seq]) bidirectional cross_document {
  dims { vocab = 32  hidden = 16  heads = 4  kv_heads = 2  head_dim = 4  ffn = 24  few = 8  rest = 16
         wide = few + rest  layers = 2 }
  init ~ normal(0.02)
  x = dropout(embedding(tokens, wte[vocab, hidden]), 0.2)
  repeat layers {
    q = x @ wq[hidden -> heads, head_dim]
    k = x @ wk[hidden -> kv_heads, head_dim]
    v = x @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, causal, documents=documents, dropout=0.3) @ wo[heads, head_dim -> hidden]
    a, b = split(x @ w_in[hidden -> wide], [few, rest])
    f = x @ w_up[hidden -> ffn]
    {unary}
    x = x + f @ w_down[ffn -> hidden]
    x = x + (relu(a) @ w_few[few -> hidden]) / (1 + sigmoid(b @ w_rest[rest -> hidden]))
  }
  loss = cross_entropy(dropout(x, 0.5) @ wte, labels)
}
""".replace("{unary}", "  ".join(f"f = {make_call(name, 'f', over='seq')}" for name in UNARY))

NESTED = """model nested(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 16  ffn = 24  layers = 2  blocks = 3 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat blocks {
    x = x + tanh(x @ w_own[hidden -> ffn]) @ w_back[ffn -> hidden]
    repeat layers {
      x = x + silu(x @ w_up[hidden -> ffn]) @ w_down[ffn -> hidden]
    }
  }
  loss = cross_entropy(x @ wte, labels)
}
mesh  { dp = 2 }
shard { batch over dp }
"""


def texts() -> Iterator[tuple[str, str]]:
    """Names and plans."""
    for precision in ("fp32", "bf16"):
        for name, case in CASES.items():
            yield f"{name}, {precision}", plan_text(replace(case, precision=precision))
        for case in (ONE, SP):
            case = replace(case, precision=precision)
            fused = replace(case, kernels="triton", padded=True, smoothing=0.1, z=0.01)
            yield f"logits apart, fused, {fused}", _apart(plan_text(fused))
            where = "sequence" if case.sp else "one rank"
            yield f"documents, {where}, {precision}", _documents(plan_text(case))
            yield (
                f"dropout, {where}, {precision}",
                _documents(f"{DROPS}{_mesh(case, 'kv_heads, ')}{train_text(case)}"),
            )
    for i, model in enumerate(MODELS):
        case = replace(
            SP if i % 2 else ONE,
            precision="bf16" if i % 3 else "fp32",
            kv=2 if model.grouped else 4,
        )
        yield f"{model.file}, {case}", of_model(model, case)
    for name in ("distilbert", "gemma2", "gpt2", "gptj"):
        model = next(model for model in MODELS if model.file == name)
        case = SP if name in ("distilbert", "gpt2") else ONE
        case = replace(case, precision="bf16", kv=2 if model.grouped else 4, kernels="triton")
        yield f"{name}, fused", of_model(model, case)
    for stage in (2, 3):
        case = replace(SP, precision="bf16", recompute="none" if stage == 2 else "full")
        yield (
            f"nested, zero {stage}",
            f"{NESTED}state {{ zero {stage} over dp }}\n{train_text(case)}",
        )
    yield "one rank, fp64", plan_text(ONE)
    yield "sequence, fp64", plan_text(SP)


def of_model(model: Model, case: Case) -> str:
    """The plan of a shipped model at a tiny size."""
    dims, kv = (f"kv_heads = {case.kv}", "kv_heads, ") if model.grouped else ("", "")
    use = (
        f'use "models/{model.file}.scale" {{ dims {{ {SIZES}  {model.dims}  {dims} }}  const'
        f" {{ {model.const} }} }}"
    )
    return f"{use}\n{_mesh(case, kv)}{train_text(case)}"


def _mesh(case: Case, kv: str) -> str:
    seq = "seq over tp" if case.sp else ""
    return f"""mesh  {{ dp = {case.dp}  tp = {case.tp} }}
shard {{ batch over dp  vocab, heads, {kv}ffn over tp  {seq} }}
"""


def _apart(text: str) -> str:
    """With logits that go through a function, and a cap behind that."""
    product = "rmsnorm(x, norm[hidden], eps) @ head[hidden -> vocab]"
    return text.replace(product, f"softcap(tanh({product}), 2)")


def _documents(text: str) -> str:
    text = text.replace("tokenizer = bytes", "separator = 10")
    if "documents" in text:
        return text
    return text.replace("labels[batch, seq]", "labels[batch, seq], documents[batch, seq]").replace(
        "mask=causal", "mask=causal, documents=documents"
    )


def compiled(text: str, folder: Path) -> tuple[ModuleType, Program]:
    """The emitted program of a plan that lies where the shipped ones do, and its IR."""
    source = Source(str(PLANS / "tiny.scale"), text)
    program = compile_plan(source)
    write_files(emit(program, source), folder)
    return import_module(folder / "train.py"), program
