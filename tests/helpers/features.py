"""Features as fragments of one plan, and what becomes of each two of them: proved, or refused
with a code.
"""

import re
from collections.abc import Sequence
from itertools import combinations

from attrs import frozen

from scalec.compiler.frontend import resolve
from scalec.compiler.proof import verify
from scalec.compiler.syntax.codes import get_code
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, lower

AXES = ("pp", "dp", "cp", "tp")
TENSOR = "vocab, heads, kv_heads, ffn over tp"
RULES = (
    "experts over dp",
    "batch over dp",
    "seq over cp",
    "seq over cp as zigzag via ring",
    "seq over cp via ulysses",
    TENSOR,
    "seq over tp",
    "layers over pp",
)
"""All rules, in the order in which a plan has them."""


@frozen
class Feature:
    """A part of a plan: axes with their sizes, rules of `shard`, settings, and words of the model.

    `attention` and `loss` are further arguments, `mlp` is one of the bodies of `MLPS`.
    """

    name: str
    axes: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = ()
    state: str = ""
    pipeline: str = ""
    train: str = ""
    data: str = ""
    vocab: str = ""
    kv_heads: str = ""
    attention: str = ""
    loss: str = ""
    inputs: str = ""
    mlp: str = ""
    tied: bool = False
    after: str = ""


ROUTED = ("experts", "padded")
DENSE = "m = silu(m @ {n}in[hidden -> ffn]) @ {n}out[ffn -> hidden]"
EXPERTS = (
    "route m to experts by top(m @ router[hidden -> experts], 2{how}) "
    "{{ m = silu(m @ e_in[hidden -> expert_ffn]) @ e_out[expert_ffn -> hidden] }}"
)
PP, DP, TP = (("pp", "2"),), (("dp", "2"),), (("tp", "2"),)

FEATURES = (
    Feature("data parallel", DP, ("batch over dp",)),
    Feature("elastic data parallel", (("dp", "1..2"),), ("batch over dp",)),
    Feature("tensor parallel", TP, (TENSOR,)),
    Feature("sequence parallel", TP, (TENSOR, "seq over tp")),
    Feature("context, keys gathered", (("cp", "2"),), ("seq over cp",)),
    Feature("context, ring", (("cp", "2"),), ("seq over cp as zigzag via ring",)),
    Feature("context, Ulysses", (("cp", "2"),), ("seq over cp via ulysses",)),
    Feature("pipeline 1F1B", PP, ("layers over pp",), pipeline="schedule = 1f1b"),
    Feature(
        "pipeline interleaved",
        (("pp", "2"),),
        ("layers over pp",),
        pipeline="schedule = interleaved_1f1b(chunks=2)",
    ),
    Feature("pipeline ZB-H1", PP, ("layers over pp",), pipeline="schedule = zb_h1"),
    Feature("experts", mlp="experts"),
    Feature("experts over dp", DP, ("experts over dp", "batch over dp"), mlp="experts"),
    Feature("experts padded", train="experts = padded", mlp="padded"),
    Feature("branches in a repeat", mlp="branches"),
    Feature("ZeRO 1", DP, ("batch over dp",), state="zero 1 over dp"),
    Feature("ZeRO 2", DP, ("batch over dp",), state="zero 2 over dp"),
    Feature("ZeRO 3", DP, ("batch over dp",), state="zero 3 over dp"),
    Feature("recompute full", train="recompute = full"),
    Feature("recompute selective", train="recompute = selective(attention)"),
    Feature("regather", train="gathered = regather"),
    Feature("bf16", train="precision = bf16"),
    Feature("fp16", train="precision = fp16"),
    Feature("sums in bf16", train="reduce = bf16"),
    Feature("torch.compile", train="compile = on"),
    Feature("Triton kernels", train="kernels = triton"),
    Feature("chunked logits", train="kernels = triton  logits = chunk"),
    Feature(
        "documents",
        attention=", documents=documents",
        inputs=", documents[batch, seq]",
        data="separator = 10",
    ),
    Feature("dropout", after="m = dropout(m, 0.1)"),
    Feature("dropped weights", attention=", dropout=0.1"),
    Feature("padded vocabulary", vocab="60 pad 4"),
    Feature("one key/value head", kv_heads="1"),
    Feature("tied embedding", tied=True),
    Feature("z-loss, smoothing", loss=", smoothing=0.1, z=1e-4"),
    Feature("masked tokens", data="masked = 15%  mask_token = 3"),
)
PROVED = "✓"


def plan(features: Sequence[Feature]) -> str:
    """The text of a plan that has all of these."""
    axes = {
        axis: size
        for feature in features
        for axis, size in sorted(feature.axes, key=lambda it: "." not in it[1])
    }
    axes |= {axis: size for feature in features for axis, size in feature.axes if "." in size}
    rules = {rule for feature in features for rule in feature.rules}

    def joined(part: str) -> str:
        return "  ".join(
            dict.fromkeys(filter(None, (getattr(feature, part) for feature in features)))
        )

    settings = "  ".join(dict.fromkeys(joined("train").split("  ")))
    arguments = f"mask={'full' if 'masked' in joined('data') else 'causal'}{''.join(f.attention for f in features)}"
    sees = "bidirectional " if "masked" in joined("data") else ""
    vocab, kv_heads = joined("vocab") or "64", joined("kv_heads") or "4"
    head = "wte" if any(feature.tied for feature in features) else "head[hidden -> vocab]"
    kinds = {feature.mlp for feature in features}
    if not kinds.isdisjoint(ROUTED) and "branches" not in kinds:
        rules = {rule.replace("ffn", "expert_ffn") for rule in rules}
    return f"""\
model m(tokens[batch, seq], labels[batch, seq]{joined("inputs")}) {sees}{{
  dims {{ vocab = {vocab}  hidden = 32  heads = 8  kv_heads = {kv_heads}  head_dim = 4  ffn = 48 }}
  dims {{ experts = 4  expert_ffn = 24  layers = 4  dense = 1 }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers as i {{
    a = rmsnorm(x, norm1[hidden], 1e-5)
    q = rope(a @ wq[hidden -> heads, head_dim], 10000)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], 10000)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, k, v, {arguments}) @ wo[heads, head_dim -> hidden]
    m = rmsnorm(x, norm2[hidden], 1e-5)
    {_mlp(kinds)}
    {joined("after")}
    x = x + m
  }}
  loss = cross_entropy(rmsnorm(x, norm[hidden], 1e-5) @ {head}, labels{"".join(f.loss for f in features)})
}}
mesh {{ {"  ".join(f"{axis} = {axes[axis]}" for axis in AXES if axis in axes)} }}
shard {{
  {"  ".join(sorted(rules, key=_place))}
}}
state {{ {"  ".join(dict.fromkeys(feature.state for feature in features if feature.state))} }}
{"".join(f"pipeline {{ {own} }}" for own in dict.fromkeys(f.pipeline for f in features) if own)}
train {{
  seq = 16  global_batch = 16  microbatch = 2  steps = 3  {settings}
  optimizer adamw {{ lr = 1e-3  clip = 1.0 }}
  data text {{ files = [python_stdlib]  {joined("data")} }}
}}
"""


def _place(rule: str) -> int:
    return RULES.index(rule.replace("expert_ffn", "ffn"))


def _mlp(kinds: set[str]) -> str:
    experts = EXPERTS.format(how=", capacity=1.5" if "padded" in kinds else "")
    routed = not kinds.isdisjoint(ROUTED)
    if "branches" in kinds:
        return (
            f"if i < dense {{ {DENSE.format(n='d_')} }} else {{"
            f" {experts if routed else DENSE.format(n='w_')} }}"
        )
    return experts if routed else DENSE.format(n="w_")


def outcome(features: Sequence[Feature]) -> str:
    """PROVED, or the codes with which the plan is refused."""
    try:
        model = resolve(Source("plan.scale", plan(features)))
        verify(lower(model, PASS_NAMES[-1]), model)
    except PlanError as error:
        return " ".join(sorted({each.code for each in error.diagnostics}))
    return PROVED


def excluded(one: Feature, other: Feature) -> bool:
    """Whether a plan says one or the other: two sizes of an axis, two ways of one rule, two
    values of one setting.
    """
    keys = [{pair.split(" = ")[0] for pair in f.train.split("  ") if pair} for f in (one, other)]
    contexts = [f.name.startswith("context") for f in (one, other)]
    pipelines, zeros = (
        [bool(f.pipeline) for f in (one, other)],
        [bool(f.state) for f in (one, other)],
    )
    same = keys[0] & keys[1] and one.train != other.train
    return (
        bool(same and "logits" not in one.train + other.train)
        or all(contexts)
        or all(pipelines)
        or all(zeros)
    )


def pairs() -> list[tuple[Feature, Feature]]:
    """All pairs that a plan can have."""
    return [pair for pair in combinations(FEATURES, 2) if not excluded(*pair)]


EITHER = "–"
HEAD = """\
# What goes with what

Each cell is a plan with both features, compiled and proved (✓), or refused with an error of this code; – is for two
features that exclude each other. Each feature is proved by itself. The tests write this table and
compare it with what the compiler does (`tests/test_features.py`); `scalec explain E0517` says what a code means.

"""
Outcomes = dict[tuple[str, str], str]
"""The outcome of two features, by their names in the order of FEATURES."""


def document(outcomes: Outcomes) -> str:
    """The page with all outcomes."""
    numbers = {feature.name: n for n, feature in enumerate(FEATURES, 1)}
    rows = [["", "feature", *map(str, numbers.values())], ["--:", "---", *[":-:"] * len(numbers)]]
    for name, n in numbers.items():
        cells = [PROVED if name == other else _cell(outcomes, name, other) for other in numbers]
        rows.append([str(n), name, *cells])
    counts = [
        sum(it == PROVED for it in outcomes.values()),
        sum(it != PROVED for it in outcomes.values()),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    codes = sorted({code for it in outcomes.values() if it != PROVED for code in it.split()})
    said = "\n".join(f"- `{code}`: {get_code(code).title}" for code in codes)
    return (
        f"{HEAD}{sum(counts)} pairs: {counts[0]} are proved, {counts[1]}"
        f" refused.\n\n{table}\n\n{said}\n"
    )


def _cell(outcomes: Outcomes, one: str, other: str) -> str:
    return outcomes.get((one, other)) or outcomes.get((other, one)) or EITHER


def written(text: str) -> Outcomes:
    """The outcomes that a page has."""
    lines = [
        line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| \d", line)
    ]
    names = [line[1] for line in lines]
    cells = (
        (pair, lines[names.index(pair[0])][2 + names.index(pair[1])])
        for pair in combinations(names, 2)
    )
    return {pair: cell for pair, cell in cells if cell != EITHER}
