"""Mistakes of every kind in one plan that has something of all sections: edits, and the one
message that each gets.
"""

from collections.abc import Iterable, Sequence

from attrs import frozen

PLAN = """\
op gate(x[.., f], y[.., f], by) -> [.., f] over .., f from "own:gate"

model mixed(tokens[batch, seq], labels[batch, seq], documents[batch, seq]) {
  dims {
    vocab = 60 pad 4
    hidden = 32
    heads = 8
    kv_heads = 4
    head_dim = hidden / heads
    ffn = 48
    experts = 4
    expert_ffn = 24
    layers = 4
    dense = 1
    spare = 4
  }
  const { theta = 10000  eps = 1e-5 }
  init ~ normal(0.02)
  init wo, w_out ~ normal(0.01)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers as i {
    a = rmsnorm(x, norm1[hidden], eps)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], theta)
    v = a @ wv[hidden -> kv_heads, head_dim] + bv[kv_heads, head_dim]
    x = x + attention(q, k, v, mask=causal, documents=documents) @ wo[heads, head_dim -> hidden]
    m = rmsnorm(x, norm2[hidden], eps)
    if i < dense {
      m = gate(m @ w_in[hidden -> ffn], m @ w_up[hidden -> ffn], 2) @ w_out[ffn -> hidden]
    } else {
      route m to experts by top(m @ router[hidden -> experts], 2, balance=0.01) {
        m = silu(m @ e_up[hidden -> expert_ffn]) @ e_down[expert_ffn -> hidden]
      }
    }
    x = x + dropout(m, 0.1)
  }
  h = rmsnorm(x, norm[hidden], eps)
  loss = cross_entropy(h @ head[hidden -> vocab], labels, z=1e-4)
}

cluster { gpu = h100_sxm  gpus_per_node = 8  nodes = 1 }
mesh {
  dp = 2
  cp = 2
  tp = 2
}
shard {
  experts over dp
  batch over dp
  seq over cp as zigzag via ring
  vocab, heads, kv_heads, ffn over tp
  seq over tp
}
state {
  zero 1 over dp
  bucket = 25MiB
  group norms { params = ["norm*"]  optimizer over cp }
}
train {
  seq = 64
  global_batch = 8
  microbatch = 2
  steps = 3
  precision = bf16
  master = fp32
  recompute = selective(attention)
  optimizer adamw {
    lr = 1e-3
    betas = [0.9, 0.95]
    weight_decay = 0.1
    schedule = cosine(warmup=2, floor=1e-4)
    group vectors { params = ["norm*"]  weight_decay = 0.0 }
  }
  data text {
    files = [python_stdlib]
    separator = 10
    holdout = 5%
  }
}
watch { finite = 2 }
"""
"""Compiles beside a module `own.py` with a function `gate`."""

RULES = PLAN[PLAN.index("  batch over dp") : PLAN.index("  seq over tp")]
"""The rules between the first and the last."""

HERE = "‹"
"""In what is written instead, the place of which the message is."""


@frozen
class Mistake:
    """Text written in place of another, and the code of its message, whose place is marked, or is
    that of words `at`.

    Nothing is told of what lies between it and the words `until`.
    """

    kind: str
    before: str
    after: str
    code: str
    at: str = ""
    until: str = ""

    @property
    def name(self) -> str:
        """For the names of tests."""
        written = self.after.replace(HERE, "").strip()[:28] or f"no {self.before.strip()[:24]}"
        return f"{self.code} {written!r}"

    @property
    def edits(self) -> list[tuple[int, int, str]]:
        """Where it begins and ends in the plan, and what is there instead; where the message is."""
        start = PLAN.index(self.before)
        there = PLAN.index(self.at) if self.at else 0
        return [
            (start, start + len(self.before), self.after),
            *([(there, there, HERE)] if self.at else []),
        ]

    @property
    def lines(self) -> set[int]:
        """The lines of the plan that it touches."""
        places = [(start, max(end - 1, start)) for start, end, _ in self.edits]
        places += [(places[0][0], PLAN.index(self.until))] if self.until else []
        return {
            n
            for start, end in places
            for n in range(PLAN.count("\n", 0, start), PLAN.count("\n", 0, end) + 1)
        }


MODEL = [
    *(
        "E0207",
        "E0209",
        "E0210",
        "E0212",
        "E0220",
        "E0303",
        "E0305",
        "E0306",
        "E0307",
        "E0311",
        "E0312",
        "E0316",
    ),
    *("E0505", "E0602", "E0603", "E0604", "E0606", "E0613"),
]
RESTS = {
    **dict.fromkeys(MODEL, "op model"),
    **dict.fromkeys(("E0310", "E0510", "E0511", "E0512"), "train mesh shard cluster"),
    **dict.fromkeys(("E0404", "E0405", "E0407", "E0409", "E0411", "E0416"), "train"),
    **dict.fromkeys(("E0402", "E0410"), "train op model"),
    **dict.fromkeys(("E0508", "E0509", "E0601", "E0609", "E0611", "E0614"), "op model mesh shard"),
}
"""The sections on which a mistake rests: it can be told only where what it is about is known."""


def section(line: int) -> str:
    """The section of the plan that a line is in."""
    heads = [text.split()[0] for text in PLAN.split("\n")[: line + 1] if text[:1].isalpha()]
    return heads[-1]


def may_wait(mistake: Mistake, others: Iterable[Mistake]) -> bool:
    """Whether it may be told only after the others are mended."""
    touched = {section(line) for other in others if other is not mistake for line in other.lines}
    return not touched.isdisjoint(RESTS.get(mistake.code, "").split())


Told = set[tuple[str, int]]


def edited(mistakes: Sequence[Mistake]) -> tuple[str, Told, Told]:
    """The plan with these mistakes, which touch different lines; code and line of each message, and
    of those that must be there."""
    text, edits = PLAN, list[tuple[int, int, str]]()
    marks = [chr(0xE000 + n) for n in range(len(mistakes))]
    for mark, mistake in zip(marks, mistakes, strict=True):
        edits += [(start, end, after.replace(HERE, mark)) for start, end, after in mistake.edits]
    for start, end, after in sorted(edits, reverse=True):
        text = text[:start] + after + text[end:]
    told = [
        (mistake.code, text[: text.index(mark)].count("\n") + 1)
        for mark, mistake in zip(marks, mistakes, strict=True)
    ]
    sure = {
        each
        for each, mistake in zip(told, mistakes, strict=True)
        if not may_wait(mistake, mistakes)
    }
    return "".join(c for c in text if not 0xE000 <= ord(c) < 0xF000), {*told}, sure


MISTAKES = [
    Mistake(kind, *rest)
    for kind, cases in {
        "syntax": [
            ("wq[hidden -> heads, head_dim]", "wq[hidden ‹=> heads, head_dim]", "E0104"),
            (
                "wk[hidden -> kv_heads, head_dim], theta)",
                "wk[hidden -> kv_heads, head_dim‹), theta)",
                "E0103",
            ),
            ("v = a @ wv", "v = ‹* a @ wv", "E0104"),
            ("  hidden = 32", "  hidden ‹: 32", "E0104"),
            ("  seq = 64", "  seq ‹= ", "E0104"),
            ("  microbatch = 2", "  microbatch ‹2", "E0104"),
            ("  batch over dp\n", "  batch ‹-> dp\n", "E0104"),
            ("  batch over dp\n", "  batch over ‹[dp]\n", "E0104"),
            ("init wo, w_out ~", "init wo, w_out ‹=", "E0104"),
            ("files = [python_stdlib]", "files = [‹python_stdlib.txt]", "E0104"),
            ("    lr = 1e-3", "    lr = ‹.001", "E0104"),
            ("  steps = 3", "  steps = ‹99999999999999999999999", "E0106"),
            ("    separator = 10", '    separator = ‹"abc', "E0105"),
            ("repeat layers as i {", "‹for i in layers {", "E0104", "", "  h = rms"),
            ("  m = rmsnorm(x, norm2", "  m ‹:= rmsnorm(x, norm2", "E0104"),
            ("  dp = 2\n", "  dp = ‹2 x 2\n", "E0104"),
            ("theta = 10000", "theta = ‹10_000 ** 2", "E0104"),
            ("mesh {", "mesh ‹= {", "E0104", "", "shard {"),
            ("  zero 1 over dp", "  ‹zero 7 over dp", "E0406"),
            ("    if i < dense {", "    ‹elif i < dense {", "E0104", "", "    x = x + dropout"),
            ("h = rmsnorm(x, norm[hidden], eps)", "h = ‹self.norm(x)", "E0104"),
        ],
        "names": [
            ("a = rmsnorm(x, norm1", "a = rmsnorm(‹y, norm1", "E0201"),
            ("q = rope(a @ wq[hidden", "q = rope(a @ wq[‹hiden", "E0201"),
            ("head_dim = hidden / heads", "head_dim = ‹hidn / heads", "E0201"),
            ("init wo, w_out", "init wo, ‹w_ot", "E0201"),
            ("  h = rmsnorm", "  ‹wte = rmsnorm(x, norm_b[hidden], eps)  h = rmsnorm", "E0207"),
            ("w_up[hidden -> ffn]", "‹w_in[hidden -> ffn]", "E0208"),
            ("cross_entropy(h @ head[hidden -> vocab]", "cross_entropy(h @ ‹w_out", "E0209"),
            ("  init ~ normal(0.02)\n", "", "E0210", "wte[vocab"),
            ("init ~ normal(0.02)", "init ~ ‹cauchy(1)", "E0211"),
            ("  h = rmsnorm", "  y = ‹silu(x)\n  h = rmsnorm", "E0212"),
            ("labels[batch, seq], doc", "labels[batch, seq], ‹maks[batch, seq], doc", "E0213"),
            ("loss = cross", "los = cross", "E0206", "mixed(tokens"),
            ("  v = a @", "  ‹_v = a @ wv2[hidden -> ffn]  v = a @", "E0215"),
            (
                "x = embedding(tokens, wte[vocab, hidden])",
                "x = embedding(tokens, wte[vocab, hidden]) * p[‹batch, hidden]",
                "E0216",
            ),
            ("if i < dense", "if ‹j < dense", "E0219", "", "    x = x + dropout"),
            ("route m to", "route ‹z to", "E0220"),
            ("dropout(m, 0.1)", "‹droput(m, 0.1)", "E0605"),
            ('from "own:gate"', 'from ‹"own:gat"', "E0218"),
            ("over .., f from", "over .., ‹g from", "E0217"),
            ("mask=causal", "mask=‹casual", "E0608"),
        ],
        "dims and numbers": [
            ("  ffn = 48", "  ffn = ‹48 @ 2", "E0301"),
            ("  expert_ffn = 24", "  expert_ffn = ‹24 / 0", "E0302"),
            ("head_dim = hidden / heads", "head_dim = ‹hidden / 5", "E0303"),
            ("  ffn = 48", "  ffn = ‹0", "E0304"),
            ("  dense = 1", "  dense = 1\n    ‹seq = 16", "E0309"),
            ("  dense = 1", "  dense = 1\n    ‹dense = 2", "E0403"),
            ("  heads = 8", "  heads = 8\n    ‹shard x { }", "E0406"),
            ("wv[hidden ->", "wv[‹ffn ->", "E0306"),
            ("x = x + dropout(m, 0.1)", "x = ‹x + m + h1[ffn]", "E0307"),
            ("wv[hidden -> kv_heads, head_dim]", "wv[hidden -> kv_heads, ‹kv_heads]", "E0308"),
            (
                "m = silu(m @ e_up[hidden -> expert_ffn]) @ e_down[expert_ffn -> hidden]",
                "m = m @ e_up[hidden -> expert_ffn]",
                "E0305",
                "m to experts",
            ),
            (
                "  x = x + dropout(m, 0.1)",
                "  x = rmsnorm(x + m, norm3[hidden], eps) @ w3[hidden -> ffn]",
                "E0305",
                "layers as i",
            ),
            ("  kv_heads = 4", "  kv_heads = 6", "E0311", "attention(q"),
            ("head_dim = hidden / heads", "head_dim = 3", "E0312", "rope(a @ wq"),
            ("eps = 1e-5", "eps = -1", "E0313", "rmsnorm(x, norm1"),
            ("theta = 10000", "theta = 0", "E0313", "rope(a @ wq"),
            ("labels, z=1e-4", "labels, z=-1.0", "E0313", "cross_entropy(h"),
            ("normal(0.01)", "normal(‹-1)", "E0313"),
            ("if i < dense", "if i < ‹9", "E0315", "", "    x = x + dropout"),
            ("-> experts], 2, bal", "-> experts], ‹9, bal", "E0316"),
            ("dropout(m, 0.1)", "dropout(m, ‹1.5)", "E0610"),
            ("  microbatch = 2", "  microbatch = 3", "E0310", "global_batch ="),
        ],
        "calls": [
            ("a = rmsnorm(x, norm1[hidden], eps)", "a = ‹rmsnorm(x, norm1[hidden])", "E0606"),
            ("mask=causal, documents", "‹is_causal=causal, mask=causal, documents", "E0606"),
            ("m = rmsnorm(x, norm2[hidden], eps)", "m = ‹silu(x)  u, w = split(m, [ffn])", "E0307"),
            ("embedding(tokens", "embedding(‹labels", "E0607"),
            ("documents=documents", "documents=‹labels", "E0607"),
            ("x = x + dropout(m, 0.1)", "x = x + m + ‹1 / m", "E0604"),
            ("x = x + dropout(m, 0.1)", "x = x + m * ‹(x @ x)", "E0613"),
            (
                "  h = rmsnorm(x, norm[hidden], eps)",
                "  h, g = ‹rmsnorm(x, norm[hidden], eps)",
                "E0602",
            ),
            ("  m = rmsnorm(x, norm2[hidden], eps)", "  m = ‹hidden", "E0603"),
            (
                "m = silu(m @ e_up[hidden -> expert_ffn])",
                "m = ‹softmax(m @ e_up[hidden -> expert_ffn])",
                "E0220",
            ),
            ("by top(", "by ‹best(", "E0605"),
            ("w_up[hidden -> ffn], 2)", "w_up[hidden -> ffn], ‹2, 3)", "E0606"),
        ],
        "settings": [
            ("  steps = 3", "  ‹stpes = 3", "E0401"),
            ("  steps = 3\n", "", "E0402", "train {"),
            ("  steps = 3", "  steps = ‹none", "E0404"),
            ("  steps = 3", "  steps = ‹0", "E0405"),
            ("  steps = 3", "  steps = 3  ‹steps = 4", "E0403"),
            ("  precision = bf16", "  precision = ‹bfloat16", "E0404"),
            ("  precision = bf16", "  precision = fp64", "E0411", "master = fp32"),
            ("  recompute = selective(attention)", "  ‹recompute = selective(atention)", "E0410"),
            ("optimizer adamw", "optimizer ‹adam", "E0404"),
            ("betas = [0.9, 0.95]", "betas = ‹0.9", "E0404"),
            ("    weight_decay = 0.1", "    weight_decay = ‹-0.1", "E0405"),
            ("floor=1e-4", "‹floor=1.0", "E0416"),
            ('vectors { params = ["norm*"]', 'vectors { ‹params = ["nrm*"]', "E0407"),
            ("    holdout = 5%", "    holdout = ‹500%", "E0405"),
            ("    separator = 10\n", "", "E0402", "data text"),
            ("data text {", "data ‹words {", "E0404"),
            ("gpu = h100_sxm", "‹gpu = h1000", "E0415"),
            ("nodes = 1", "‹nodes = 2", "E0512"),
            ("finite = 2", "‹finit = 2", "E0401"),
            ("  bucket = 25MiB", "  bucket = ‹25MB", "E0404"),
            ("watch {", "‹whatch {", "E0406"),
        ],
        "mesh and shard": [
            ("  tp = 2\n", "  ‹tp = [2]\n", "E0501"),
            ("  tp = 2\n", "  tp = 2\n  ‹ep = 2\n", "E0509"),
            ("  batch over dp\n", "  ‹batch = dp\n", "E0502"),
            ("  batch over dp\n", "  ‹bacth over dp\n", "E0503"),
            ("ffn over tp", "ffn over ‹pt", "E0504"),
            ("ffn over tp", "ffn, ‹hidden over tp", "E0505"),
            ("  ffn = 48", "  ffn = 47", "E0510", "ffn over tp"),
            ("as zigzag", "as ‹zigzga", "E0518"),
            ("via ring", "via ‹rings", "E0518"),
            ("  seq over tp\n", "  seq over tp\n  ‹spare over tp\n", "E0508"),
            ("  dp = 2\n", "  dp = ‹2..1\n", "E0520"),
            ("optimizer over cp", "‹weights over cp", "E0514"),
            ('norms { params = ["norm*"]', 'norms { ‹params = ["nrm*"]', "E0407"),
            ("  zero 1 over dp", "  zero 1 over dp, ‹dp", "E0403"),
            (
                "gpus_per_node = 8  nodes = 1",
                "gpus_per_node = 1  nodes = 8",
                "E0511",
                "heads, kv_heads, ffn over tp",
            ),
            ("heads, kv_heads, ffn over tp", "heads, ffn over tp", "E0609", "attention(q"),
            ("heads, kv_heads, ffn over tp", "kv_heads, ffn over tp", "E0609", "attention(q"),
            ("mask=causal, doc", "mask=causal, dropout=0.1, doc", "E0611", "attention(q"),
            (
                "x = x + dropout(m, 0.1)",
                "x = x + m + ‹softmax(m @ w7[hidden -> ffn], over=ffn) @ w8[ffn -> hidden]",
                "E0601",
            ),
            (
                "v = a @ wv[hidden -> kv_heads, head_dim]",
                "v = ‹softmax(a @ wv[hidden -> kv_heads, head_dim], over=kv_heads)",
                "E0601",
            ),
            (
                f"experts over dp\n{RULES}  seq over tp\n",
                f"‹experts over dp, tp\n{RULES}",
                "E0614",
            ),
        ],
    }.items()
    for rest in cases
]
"""Each is one mistake."""
