"""The plans of these tests as text, beside the reference's description of the same model and
optimizer.
"""

from dataclasses import dataclass, replace

from helpers.oracle.reference import Config, Route, Training

SEQ = 8
ROWS = 2  # of a microbatch on one data-parallel rank

LAYER = """
    a = rmsnorm(x, norm1[hidden], eps)
    q = rope(a @ wq[hidden -> heads, head_dim], theta)
    k = rope(a @ wk[hidden -> kv_heads, head_dim], theta)
    v = a @ wv[hidden -> kv_heads, head_dim]
"""
LATENT = """
    a = rmsnorm(x, norm1[hidden], eps)
    q, qp = split(rmsnorm(a @ wq_a[hidden -> q_rank], q_norm[q_rank], eps) @ wq[q_rank -> heads, qk], [nope, pe])
    c, kp = split(a @ wkv_a[hidden -> kv_a], [kv_rank, pe])
    k, v = split(rmsnorm(c, kv_norm[kv_rank], eps) @ wkv[kv_rank -> kv_heads, kv_b], [nope, v_dim])
    q = concat(q, rope(qp, theta), as=qk)
    k = concat(k, rope(kp, theta), as=qk)
"""
SEQUENTIAL = """
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    m = rmsnorm(x, norm2[hidden], eps)
    x = x + (silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]
"""
PARALLEL = """
    o = attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    x = x + o + (silu(a @ w_gate[hidden -> ffn]) * (a @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]
"""
ROUTED = """
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    y = rmsnorm(x, norm2[hidden], eps)
    route y to experts by top(y @ router[hidden -> experts], {}) {{
      y = (silu(y @ w_gate[hidden -> expert_ffn]{}) * (y @ w_up[hidden -> expert_ffn])) @ w_down[expert_ffn -> hidden]{}
    }}
    x = x + y
"""
SHARED = """
    x = x + attention(q, k, v, mask=causal) @ wo[heads, head_dim -> hidden]
    m = rmsnorm(x, norm2[hidden], eps)
    s = (silu(m @ w_gate[hidden -> ffn]) * (m @ w_up[hidden -> ffn])) @ w_down[ffn -> hidden]
    y = m
    route y to experts by top(y @ router[hidden -> experts], {}) {{
      y = (silu(y @ e_gate[hidden -> expert_ffn]) * (y @ e_up[hidden -> expert_ffn])) @ e_down[expert_ffn -> hidden]
    }}
    x = x + y + s
"""

EVERY = """
    a = layernorm(x, norm1[hidden], bias1[hidden], eps)
    q = rope(rmsnorm(a @ wq[hidden -> heads, head_dim], q_norm[heads, head_dim], eps), theta)
    k = layernorm(a @ wk[hidden -> kv_heads, head_dim], k_norm[kv_heads, head_dim], k_bias[kv_heads, head_dim], eps)
    v = a @ wv[hidden -> kv_heads, head_dim]
    x = x + attention(q, rope(k, theta), v, mask=causal) @ wo[heads, head_dim -> hidden]
    m = layernorm(x, norm2[hidden], eps)
    gate = softmax(m @ w_gate[hidden -> experts])
    joined = concat(gate, m @ w_few[hidden -> few], as=wide)
    up = layernorm(joined @ w_up[wide -> ffn], norm3[ffn], eps)
    total = sum(gate, over=seq)
    scale = softmax(mean(m, over=seq), over=hidden) * mean(total * total, over=[experts])
    x = x + silu(up) @ w_down[ffn -> hidden] + m * scale * mean(up, over=ffn)
"""

EPS = 1e-5
"""So large that updates do not show the rounding of gradients of experts to which hardly a
token goes.
"""
OPTIMIZERS = {
    "sgd": Training(weight_decay=0.05),
    "momentum": Training(momentum=0.9, weight_decay=0.05),
    "adamw": Training("adamw", eps=EPS, weight_decay=0.1),
    "groups": Training(
        "adamw",
        eps=EPS,
        weight_decay=0.1,
        decay=(("norm", 0.0), ("norm1", 0.0), ("norm2", 0.0), ("wq", 0.3)),
        scale=(("norm", 0.5), ("norm1", 0.5), ("norm2", 0.5)),
    ),
}
GROUPS = """
    group norms { params = ["*norm*"]  weight_decay = 0.0  lr_scale = 0.5 }
    group queries { params = ["*wq*"]  weight_decay = 0.3 }
"""

ROUTES = {
    "two": Route(affine=True),
    "one": Route(k=1, normalise=False),
    "sigmoid": Route(affine=True, k=3, score="sigmoid", scale=2.5),
    "groups": Route(k=2, score="sigmoid", normalise=False, groups=4, among=2),
    "eight": Route(experts=8, balance=0.05),
    "biased": Route(score="sigmoid", scale=2.5, groups=4, among=2, rate=0.05),
    "biased softmax": Route(k=1, normalise=False, rate=0.05, balance=0.05),
    "losses": Route(balance=0.05, z=0.01, score="sigmoid"),
    "capacity": Route(balance=0.05, capacity=1.0),
    "bounded": Route(capacity=1.0),
    "roomy": Route(affine=True, k=3, score="sigmoid", scale=2.5, z=0.01, capacity=2.5),
    "eight, bounded": Route(experts=8, balance=0.05, capacity=1.5),
    "shared": Route(balance=0.05, shared=True),
    "all layers": Route(aux=0.05, aux_batch=2),
    "all layers, sigmoid": Route(aux=0.05, score="sigmoid", z=0.01),
}
ROUTES |= {
    f"{name}_of_eight": replace(ROUTES[name], experts=8)
    for name in ("two", "losses", "bounded", "capacity")
}
"""Mixtures of experts, by the name of the model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the space that the tests cover."""

    dp: int = 1
    tp: int = 1
    sp: bool = False  # sequence parallelism
    vocab: bool = True  # vocabulary over tp
    kv: int = 2
    microbatches: int = 1
    valid: str = "uneven"  # which labels count
    gathered: str = "save"
    recompute: str = "none"
    compile: str = "off"
    optimizer: str = "sgd"
    clip: float = 0.0
    model: str = "llama"
    precision: str = "fp64"
    kernels: str = "auto"
    logits: str = "chunk"  # where kernels are Triton's
    replicas: int = 1  # a second data axis, outside dp
    rules: str = ""  # of `shard`, in place of the usual ones
    padded: bool = False  # the last three of the vocabulary are padding
    smoothing: float = 0.0
    z: float = 0.0
    state: str = ""  # what the section `state` says
    pp: int = 1
    schedule: str = "1f1b"
    stages: str = ""  # layers of each stage, where the plan says
    layers: int = 2
    cp: int = 1
    how: str = ""  # what the rule of the sequence over cp says besides
    uly: int = 1  # an axis over which attention exchanges the sequence for heads
    ep: int = 1  # an axis of experts, and of the batch
    experts: str = ""  # the axes that they lie over
    inner: bool = False  # the dim within each expert over tp
    bounded: bool = False  # rows of experts are padded to their capacity

    @property
    def ranks(self) -> int:
        """The size of the mesh."""
        return self.pp * self.replicas * self.dp * self.ep * self.cp * self.uly * self.tp

    @property
    def rows(self) -> int:
        """The global batch."""
        return ROWS * self.replicas * self.dp * self.ep * self.microbatches

    @property
    def config(self) -> Config:
        """The reference's model."""
        return Config(
            classes=29 if self.padded else 32,
            smoothing=self.smoothing,
            z_loss=self.z,
            kv_heads=self.kv,
            tied=self.model == "tied",
            parallel=self.model == "parallel",
            every=self.model == "every",
            latent=self.model == "latent",
            layers=self.layers,
            route=ROUTES.get(self.model),
        )

    @property
    def training(self) -> Training:
        """The reference's optimizer."""
        return Training(**{**vars(OPTIMIZERS[self.optimizer]), "clip": self.clip})

    def __str__(self) -> str:
        """The settings that differ from the default."""
        changed = {key: value for key, value in vars(self).items() if value != getattr(Case, key)}
        return (
            "-".join(key if value is True else f"{key}_{value}" for key, value in changed.items())
            or "default"
        )


def plan_text(case: Case) -> str:
    """The plan of a case."""
    c = case.config
    head = "wte" if c.tied else "head[hidden -> vocab]"
    vocab = f"{c.classes} pad 4" if case.padded else c.vocab
    options = "".join(
        f", {name}={value}"
        for name, value in (("smoothing", case.smoothing), ("z", case.z))
        if value
    )
    layer = _layer(c)
    sees = "bidirectional " if "over=seq" in layer else ""
    return f"""model llama(tokens[batch, seq], labels[batch, seq]) {sees}{{
  dims  {{ vocab = {vocab}  hidden = {c.hidden}  heads = {c.heads}  kv_heads = {c.kv_heads}
          head_dim = hidden / heads  ffn = {c.ffn}  layers = {c.layers}
          {_more_dims(c)} }}
  const {{ eps = {c.eps}  theta = {c.theta} }}
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {{{layer}  }}
  loss = cross_entropy(rmsnorm(x, norm[hidden], eps) @ {head}, labels{options})
}}
mesh  {{ {_outer(case)} dp = {case.dp}  {contexts(case)} tp = {case.tp} }}
shard {{ {case.rules or _rules(case)} }}
state {{ {case.state} }}
{_pipeline(case)}
{train_text(case)}"""


def _more_dims(c: Config) -> str:
    if c.every:
        return f"experts = {c.experts}  few = {c.few}  wide = experts + few"
    if c.latent:
        return f"""q_rank = {c.q_rank}  kv_rank = {c.kv_rank}  nope = {c.nope}  pe = {c.pe}  v_dim = {c.v_dim}
          qk = nope + pe  kv_a = kv_rank + pe  kv_b = nope + v_dim"""
    return f"experts = {c.route.experts}  expert_ffn = {c.ffn}" if c.route else ""


def _layer(c: Config) -> str:
    if c.every:
        return EVERY
    if c.latent:
        return LATENT + SEQUENTIAL.replace("head_dim", "v_dim")
    if c.route:
        biases = (" + b_gate[expert_ffn]", " + b_down[hidden]") if c.route.affine else ("", "")
        return LAYER + (SHARED if c.route.shared else ROUTED).format(_choice(c.route), *biases)
    return LAYER + (PARALLEL if c.parallel else SEQUENTIAL)


def _choice(route: Route) -> str:
    settings = (
        f"score={route.score}, normalise={'on' if route.normalise else 'off'}, scale={route.scale}"
    )
    more = {"capacity": route.capacity, "balance": route.balance, "z": route.z}
    said = "".join(f", {name}={value}" for name, value in more.items() if value)
    said += f", aux_loss={route.aux}, aux_batch={route.aux_batch}" * (route.aux > 0)
    said += f", bias=router_bias[experts], rate={route.rate}" if route.rate else ""
    return f"{route.k}, {settings}, groups={route.groups}, from={route.among}{said}"


def _kernels(case: Case) -> str:
    logits = f"  logits = {case.logits}" if case.kernels == "triton" else ""
    return f"kernels = {case.kernels}{logits}"


def train_text(case: Case) -> str:
    """How a case trains."""
    t = case.training
    momentum = (
        f"momentum = {t.momentum}"
        if t.kind == "sgd"
        else f"betas = [{t.betas[0]}, {t.betas[1]}]  eps = {t.eps}"
    )
    return f"""train {{
  seq = {SEQ}  global_batch = {case.rows}  microbatch = {ROWS}  steps = 10  seed = 3
  precision = {case.precision}  {_kernels(case)}  compile = {case.compile}
  gathered = {case.gathered}  recompute = {case.recompute}{"  experts = padded" * case.bounded}
  optimizer {t.kind} {{
    lr = 0.01  {momentum}  weight_decay = {t.weight_decay}  clip = {t.clip}
    schedule = cosine(warmup=2, floor=1e-3)
    {GROUPS if case.optimizer == "groups" else ""}
  }}
  data text {{ files = [python_stdlib]  tokenizer = bytes }}
}}
"""


def _rules(case: Case) -> str:
    batch = ("replica, " if case.replicas > 1 else "") + "dp" + (", ep" if case.ep > 1 else "")
    experts = f"experts over {case.experts}  " if case.experts else ""
    vocab, seq = "vocab, " if case.vocab else "", "  seq over tp" if case.sp else ""
    route = case.config.route
    ffn = (", ffn" if not route or route.shared else "") + (
        ", expert_ffn" if route and case.inner else ""
    )
    layers = "  layers over pp" if case.pp > 1 else ""
    return (
        f"{experts}batch over {batch}  {context_rules(case)}{vocab}heads, kv_heads{ffn} over"
        f" tp{seq}{layers}"
    )


def context_rules(case: Case) -> str:
    """How the sequence lies over axes of its own."""
    rules = f"seq over cp {case.how}  " if case.cp > 1 else ""
    return rules + ("seq over uly via ulysses  " if case.uly > 1 else "")


def contexts(case: Case) -> str:
    """The axes of experts, of context and of Ulysses."""
    sizes = {"ep": case.ep, "cp": case.cp, "uly": case.uly}
    return "  ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)


def _outer(case: Case) -> str:
    sizes = {"pp": case.pp, "replica": case.replicas}
    return "  ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)


def _pipeline(case: Case) -> str:
    stages = f"  stages = {case.stages}" if case.stages else ""
    return f"pipeline {{ schedule = {case.schedule}{stages} }}" if case.pp > 1 else ""
