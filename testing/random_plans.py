"""Random plans: models, meshes, orders of rules, ways to train.

Purpose: hypothesis strategies whose examples are texts of the language, so that a counterexample prints as a plan.
Non-goals: every plan of the language, and sizes: what is proved of a plan does not depend on them.
"""

import re

from attrs import field, frozen
from hypothesis import reject
from hypothesis import strategies as st

from .checks import compiles

VOCAB, FFN, HEADS, SEQ = 16, 16, 8, 8

LINES = [
    "x = x + silu(x)",
    "x = x + c * silu(x)",
    "x = x * scale{n}[hidden] + x",
    "x = rmsnorm(x, g{n}[hidden], eps) + x",
    "y = rmsnorm(x, g{n}[hidden], eps)\nx = x + y * y",
    "y = silu(x @ u{n}[hidden -> ffn]) @ v{n}[ffn -> hidden]\nx = x + y + silu(y)",
    "y = silu(x @ u{n}[hidden -> ffn])\nx = x + y @ v{n}[ffn -> hidden] + (y * y) @ w{n}[ffn -> hidden] + c",
    "x = x + silu(x @ u{n}[hidden -> ffn] + b{n}[ffn]) @ v{n}[ffn -> hidden]",
    "x = x + silu(x @ u{n}[hidden -> ffn]) @ v{n}[ffn -> hidden] + b{n}[hidden]",
    "x = x + silu(x) @ s{n}[hidden -> ffn] @ t{n}[ffn -> hidden] * (e{n}[hidden] * f{n}[hidden])",
    "y = x @ p{n}[hidden -> ffn]\nx = x + silu(y) @ q{n}[ffn -> hidden] + y @ r{n}[ffn -> hidden]",
    "y = silu(x) @ shared\nx = x + silu(y) @ o{n}[ffn -> hidden]",
    "x = x + silu(x @ u{n}[hidden -> ffn]) @ (v{n}[ffn -> hidden] * s{n}[hidden, ffn])",
    "x = x + silu(x @ wte) @ back{n}[vocab -> hidden]",
]
MLP = """m = rmsnorm(x, norm_m{n}[hidden], eps)
x = x + (silu(m @ w_gate{n}[hidden -> ffn]) * (m @ w_up{n}[hidden -> ffn])) @ w_down{n}[ffn -> hidden]"""
ATTENTION = """a = rmsnorm(x, norm_a{n}[hidden], eps)
q = {queries}
k = rope(a @ wk{n}[hidden -> {few}, head_dim]{bias}, theta)
v = a @ wv{n}[hidden -> {few}, head_dim]
o = attention(q, k, v, mask=causal) @ wo{n}[heads, head_dim -> hidden]
x = x + o{parallel}"""
QUERIES = [
    "rope(a @ wq{n}[hidden -> heads, head_dim], theta)",
    "a @ wq{n}[hidden -> heads, head_dim] + bq{n}[heads, head_dim]",
    "rope(rmsnorm(a @ wq{n}[hidden -> heads, head_dim], norm_q{n}[head_dim], eps), theta)",
]
PARALLEL = ["", " + silu(a @ w_up{n}[hidden -> ffn]) @ w_down{n}[ffn -> hidden]"]
STARTS = [
    "x = embedding(tokens, wte[vocab, hidden])",
    "x = embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden]",
    "x = embedding(tokens, wte[vocab, hidden]) * scale[hidden]",
]
CAPTURED = """c = rmsnorm(x, norm_c[hidden], eps) @ shared[hidden -> ffn] @ back[ffn -> hidden]
x = x + c"""
"""A value and a parameter for whatever comes after, inside of repeats too."""

ENDS = [
    "loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ head[hidden -> vocab], labels)",
    "loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ wte, labels)",
    "loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ wte, labels, smoothing=0.1, z=0.01)",
]
OPTIMIZERS = [
    "sgd { lr = 0.5  clip = {clip} }",
    "sgd { lr = 0.5  momentum = 0.9  clip = {clip} }",
    "adamw { lr = 1e-3  weight_decay = 0.1  clip = {clip}  schedule = cosine(warmup=2) }",
    'adamw { lr = 1e-3  clip = {clip}  group norms { params = ["norm*"]  weight_decay = 0.0  lr_scale = 2.0 } }',
]


@frozen
class Sketch:
    """A plan in pieces.

    `microbatch` counts sequences on all `ranks` data-parallel ranks together; `rules` are those of `shard`, in order.
    """

    body: str
    dims: str
    mesh: str
    rules: tuple[str, ...]
    ranks: int
    microbatches: int
    microbatch: int
    train: str
    clip: float
    optimizer: str
    seq: int = field(default=SEQ, init=False)

    def text(self) -> str:
        """The plan as a person would write it."""
        rules = "\n  ".join(self.rules)
        return f"""model random(tokens[batch, seq], labels[batch, seq]) {{
  dims {{ {self.dims} }}
  const {{ eps = 1e-5  theta = 10000 }}
  init ~ normal(0.02)
{_indented(self.body)}
}}
mesh {{ {self.mesh} }}
shard {{
  {rules}
}}
train {{
  seq = {self.seq}  global_batch = {self.microbatches * self.microbatch}  microbatch = {self.microbatch // self.ranks}
  steps = 1  {self.train}
  optimizer {self.optimizer.replace("{clip}", str(self.clip))}
  data text {{ files = [python_stdlib] }}
}}
"""


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


class Text(str):
    """A plan's text, which counterexamples show as it stands."""

    def __repr__(self) -> str:
        return f'"""\n{self}"""'


@st.composite
def plans(draw: st.DrawFn) -> str:
    """Texts of random plans that compile."""
    plan = Text(draw(sketches()).text())
    return plan if compiles(plan) else reject()


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    """Random plans in pieces, a few of which the compiler refuses."""
    body = draw(_bodies())
    sizes, roles = draw(_meshes("attention" not in body))
    ranks = 1
    for axis in roles["batch"]:
        ranks *= sizes[axis]
    few = draw(st.sampled_from([1, 2, 4, HEADS]))
    precision, gathered = draw(st.sampled_from(["fp32", "bf16", "fp64"])), draw(st.sampled_from(["save", "regather"]))
    return Sketch(
        body=body,
        dims=f"vocab = {VOCAB}  hidden = 4  heads = {HEADS}  kv_heads = {few}  head_dim = 2  ffn = {FFN}"
        "  layers = 2  blocks = 2",
        mesh="  ".join(f"{axis} = {size}" for axis, size in sizes.items()),
        rules=tuple(draw(_rules(body, [*sizes], roles))),
        ranks=ranks,
        microbatches=draw(st.integers(1, 3)),
        microbatch=ranks * draw(st.integers(1, 2)),
        train=f"precision = {precision}  gathered = {gathered}",
        clip=draw(st.sampled_from([0.0, 0.1, 100.0])),
        optimizer=draw(st.sampled_from(OPTIMIZERS)),
    )


# ---- models


@st.composite
def _bodies(draw: st.DrawFn) -> str:
    """An embedding, statements in repeats of any nesting up to two, and a loss."""
    numbers = iter(range(100))

    def lines(most: int) -> str:
        chosen = draw(st.lists(_statements(), min_size=1, max_size=most))
        return "\n".join(line.replace("{n}", str(next(numbers))) for line in chosen)

    def repeat(dim: str, inner: str) -> str:
        return f"repeat {dim} {{\n{_indented(inner)}\n}}"

    parts = [draw(st.sampled_from(STARTS)), CAPTURED]
    for _ in range(draw(st.integers(0, 2))):
        inner = repeat("layers", lines(2))
        parts.append(repeat("blocks", f"{inner}\n{lines(1)}") if draw(st.booleans()) else inner)
    return "\n".join([*parts, lines(2), draw(st.sampled_from(ENDS))])


@st.composite
def _statements(draw: st.DrawFn) -> str:
    """One of the lines, a gated MLP, or attention of some kind, alone or beside an MLP."""
    kind = draw(st.integers(0, 3))
    if kind < 2:
        return draw(st.sampled_from(LINES))
    if kind == 2:
        return MLP
    few = draw(st.sampled_from(["kv_heads", "heads"]))
    return (
        ATTENTION.replace("{queries}", draw(st.sampled_from(QUERIES)))
        .replace("{parallel}", draw(st.sampled_from(PARALLEL)))
        .replace("{bias}", draw(st.sampled_from(["", f" + bk{{n}}[{few}, head_dim]"])))
        .replace("{few}", few)
    )


# ---- meshes and rules

Roles = dict[str, list[str]]
"""The axes over which the batch lies, the weights, and the sequence alone; in the order of the mesh."""


@st.composite
def _meshes(draw: st.DrawFn, sequence: bool) -> tuple[dict[str, int], Roles]:
    """One to three axes in any order, of eight ranks at most; `sequence`: whether one may be for that alone."""
    of = {"replica": "batch", "dp": "batch", "tp": "weights", "ep": "weights"} | ({"cp": "seq"} if sequence else {})
    names = draw(st.lists(st.sampled_from([*of]), min_size=1, max_size=3, unique=True))
    most = 4 if len(names) < 3 else 2
    sizes = {name: draw(st.sampled_from([size for size in (2, 4, 1) if size <= most])) for name in names}
    if len(names) == 2 and set(sizes.values()) == {4}:
        sizes[names[0]] = 2
    return sizes, {role: [name for name in names if of[name] == role] for role in ("batch", "weights", "seq")}


@st.composite
def _rules(draw: st.DrawFn, body: str, axes: list[str], roles: Roles) -> list[str]:
    """Rules in any order, but the sequence after the heads where there is attention."""
    over = {"batch": roles["batch"]}
    dims = [dim for dim in ("vocab", "ffn", "heads", "kv_heads") if re.search(rf"\b{dim}\b", body)]
    for axis in roles["weights"]:
        for dim in draw(st.sets(st.sampled_from([dim for dim in dims if dim != "kv_heads"]), min_size=1)):
            over.setdefault(dim, []).append(axis)
    if "kv_heads" in dims and draw(st.booleans()):
        over["kv_heads"] = over.get("heads", [])
    rules = [f"{dim} over {', '.join(on)}" for dim, on in over.items() if on]
    if draw(st.booleans()):
        rules = _together(rules)
    rules = draw(st.permutations(rules))
    able = [axis for axis in roles["weights"] if "attention" not in body or axis in over.get("heads", [])]
    sequence = [axis for axis in axes if axis in roles["seq"] or (axis in able and draw(st.booleans()))]
    at = len(rules) if "attention" in body else draw(st.integers(0, len(rules)))
    return [*rules[:at], *([f"seq over {', '.join(sequence)}"] if sequence else []), *rules[at:]]


def _together(rules: list[str]) -> list[str]:
    """One rule for all dims over the same axes."""
    dims: dict[str, list[str]] = {}
    for rule in rules:
        dim, _, axes = rule.partition(" over ")
        dims.setdefault(axes, []).append(dim)
    return [f"{', '.join(those)} over {axes}" for axes, those in dims.items()]
