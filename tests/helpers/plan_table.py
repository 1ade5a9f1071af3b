"""The plans that whole steps are tested on.

All compile; what the compiler refuses is tested with its diagnostics.
"""

from attrs import evolve

from helpers.small_plans import (
    ALL_OVER_TP,
    ATTENTION,
    DIMS,
    HEAD,
    LLAMA,
    MLP,
    PARALLEL_BLOCK,
    START,
    WITH_SEQ,
    Plan,
)

DP_TP = Plan(mesh="dp = 2  tp = 2", shard=WITH_SEQ, ranks=2)
SMOOTHED = evolve(
    DP_TP,
    body=LLAMA.replace(", labels)", ", labels, smoothing=0.1, z=0.01)"),
    dims=DIMS.replace("vocab = 12", "vocab = 9 pad 4"),
)
DOCUMENTS = evolve(
    DP_TP,
    body=LLAMA.replace("mask=causal", "mask=causal, documents=documents"),
    inputs=", documents[batch, seq]",
    data="separator = 10",
)
DROP = "x = dropout(x, 0.1)"
DROPPING = ATTENTION.replace("mask=causal", "mask=causal, dropout=0.2")
DROPPED = MLP.replace("(m @ w_up[hidden -> ffn])", "dropout(m @ w_up[hidden -> ffn], 0.1)")
DROPOUT = evolve(DP_TP, body=f"{START} {DROP} repeat layers {{ {DROPPING} {DROPPED} }} {HEAD}")
FUSED = "precision = fp64  kernels = triton  logits = chunk"
NO_DP = "vocab, heads, kv_heads, ffn over tp"
SMALL_MLP = "silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]"

NORMED = "rmsnorm(a @ wq[hidden -> heads, head_dim], qn[head_dim], eps)"

PLANS = {
    "one device": Plan(),
    "data": Plan(mesh="dp = 4", shard="batch over dp", ranks=4),
    "tensor": Plan(mesh="tp = 2", shard=NO_DP),
    "tensor, sequence": Plan(mesh="tp = 2", shard=f"{NO_DP}  seq over tp"),
    "data, tensor": Plan(mesh="dp = 2  tp = 2", shard=ALL_OVER_TP, ranks=2),
    "data, tensor, sequence": DP_TP,
    "tensor outside of data": Plan(mesh="tp = 2  dp = 2", shard=WITH_SEQ, ranks=2),
    "keys gathered": Plan(
        mesh="dp = 2  cp = 2  tp = 2",
        shard=f"batch over dp  seq over cp as zigzag  {NO_DP}  seq over tp",
        ranks=2,
        seq=8,
        state="zero 1 over dp, cp",
    ),
    "keys around a ring": Plan(
        mesh="dp = 2  cp = 2  uly = 2",
        shard="batch over dp  seq over cp as zigzag via ring  seq over uly via ulysses",
        ranks=2,
        seq=8,
    ),
    "axes of size 1": Plan(mesh="dp = 1  tp = 1", shard=WITH_SEQ),
    "three axes": Plan(
        mesh="replica = 2  dp = 2  tp = 2",
        shard=WITH_SEQ.replace("over dp", "over replica, dp"),
        ranks=4,
    ),
    "unused tensor axis of size 1": Plan(mesh="dp = 2  tp = 1", shard="batch over dp", ranks=2),
    "regather": evolve(DP_TP, train="precision = fp64  gathered = regather"),
    "recomputed": evolve(DP_TP, train="precision = fp64  recompute = full"),
    "every second recomputed": evolve(
        DP_TP, train="precision = fp64  recompute = every(2, layers)"
    ),
    "recomputed, dropout": evolve(DROPOUT, train="precision = fp64  recompute = full"),
    "ops recomputed, regather": evolve(
        DP_TP,
        train="precision = fp64  gathered = regather  recompute = selective(attention, rmsnorm,"
        " silu)",
    ),
    "bf16": evolve(DP_TP, train="precision = bf16"),
    "bf16 without masters": evolve(DP_TP, train="precision = bf16  master = bf16", clip=0.5),
    "fp16": evolve(DP_TP, train="precision = fp16", clip=0.5),
    "fp16, shared, summed in fp16": evolve(
        DP_TP, state="zero 1 over dp", train="precision = fp16  reduce = fp16"
    ),
    "fp32, summed in bf16": evolve(DP_TP, train="precision = fp32  reduce = bf16"),
    "shared optimizer state": evolve(DP_TP, state="zero 1 over dp", train="precision = bf16"),
    "shared inside, copied outside": Plan(
        mesh="replica = 2  dp = 2  tp = 2",
        shard=WITH_SEQ.replace("over dp", "over replica, dp"),
        ranks=4,
        state="optimizer over dp",
        clip=0.5,
    ),
    "shared over two axes": Plan(
        mesh="replica = 2  dp = 2",
        shard="batch over replica, dp",
        ranks=4,
        state="optimizer over replica, dp",
    ),
    "layers reduced apart": evolve(DP_TP, state="zero 0 over dp  bucket = 300B"),
    "layers gathered ahead": evolve(
        DP_TP, state="zero 1 over dp  bucket = 300B", train="precision = bf16"
    ),
    "shared gradients": evolve(DP_TP, state="zero 2 over dp", train="precision = bf16", clip=0.5),
    "shared parameters": evolve(DP_TP, state="zero 3 over dp", train="precision = bf16", clip=0.5),
    "shared parameters, several buckets": evolve(
        DP_TP, state="zero 3 over dp  bucket = 300B  prefetch = 0"
    ),
    "shared parameters, gradients kept": evolve(DP_TP, state="parameters, optimizer over dp"),
    "shared parameters, norms apart": evolve(
        DP_TP, state='zero 3 over dp  group norms { params = ["norm*"]  zero 1 over dp }'
    ),
    "shared parameters, copied outside": Plan(
        mesh="replica = 2  dp = 2  tp = 2",
        shard=WITH_SEQ.replace("over dp", "over replica, dp"),
        ranks=4,
        state="zero 3 over dp  prefetch = 2",
        clip=0.5,
    ),
    "shared parameters, recomputed": evolve(
        DP_TP, state="zero 3 over dp", train="recompute = full"
    ),
    "shared parameters, nested repeats": evolve(
        DP_TP,
        body=f"{START} repeat blocks {{ repeat layers {{ {MLP} }} {ATTENTION} }} {HEAD}",
        state="zero 3 over dp  bucket = 300B",
    ),
    "shared gradients, layers that differ": evolve(
        DP_TP,
        body=f"""{START}
        repeat layers as i {{ if i < 1 {{ {ATTENTION} }} else {{ x = x * g[hidden] }} {MLP} }} {HEAD}""",
        state="zero 2 over dp",
    ),
    "fused": evolve(DP_TP, train=FUSED),
    "fused, smoothing, padding": evolve(
        DP_TP,
        body=LLAMA.replace(", labels)", ", labels, smoothing=0.1, z=0.01)")
        .replace("silu(", "gelu(")
        .replace("w_gate[hidden -> ffn]", "w_gate[hidden -> ffn], approximate=tanh"),
        dims=DIMS.replace("vocab = 12", "vocab = 9 pad 4"),
        train=f"{FUSED}  recompute = full",
    ),
    "fused, vocabulary whole, tied, capped": evolve(
        DP_TP,
        body=LLAMA.replace("= cross_entropy(", "= cross_entropy(softcap(").replace(
            "@ head[hidden -> vocab]", "@ wte, 2)"
        ),
        shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp",
        state="zero 3 over dp",
        train=FUSED,
    ),
    "fused, head with a bias": evolve(
        DP_TP,
        body=LLAMA.replace(", labels)", " + b_head[vocab], labels, smoothing=0.1, z=0.01)"),
        dims=DIMS.replace("vocab = 12", "vocab = 9 pad 4"),
        state="zero 3 over dp",
        train=FUSED,
    ),
    "fused, head with a bias, vocabulary whole": evolve(
        DP_TP,
        body=LLAMA.replace("= cross_entropy(", "= cross_entropy(softcap(").replace(
            "@ head[hidden -> vocab]", "@ wte + b_head[vocab], 2)"
        ),
        shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp",
        train=FUSED,
    ),
    "fused, logits of two losses": evolve(
        DP_TP,
        body=f"""{START} y = rmsnorm(x, norm[hidden], eps) @ head[hidden -> vocab]
        loss = cross_entropy(y, labels, z=0.01) + cross_entropy(softcap(y, 2), labels, smoothing=0.1)""",
        dims=DIMS.replace("vocab = 12", "vocab = 9 pad 4"),
        train=FUSED,
    ),
    "fused, logits capped alone": evolve(
        DP_TP,
        body=LLAMA.replace(
            HEAD,
            "loss = cross_entropy(softcap(silu(x @ head[hidden -> vocab]), 2), labels, z=0.01)",
        ),
        mesh="dp = 2",
        shard="batch over dp",
        train=FUSED,
    ),
    "one microbatch": evolve(DP_TP, microbatches=1),
    "three microbatches": evolve(DP_TP, microbatches=3),
    "two key/value heads on four ranks": Plan(mesh="tp = 4", shard=f"{NO_DP}  seq over tp"),
    "two key/value heads on four ranks, no sequence": Plan(
        mesh="dp = 2  tp = 4", shard=ALL_OVER_TP, ranks=2
    ),
    "two key/value heads on eight ranks": Plan(
        mesh="tp = 8",
        shard=f"{NO_DP}  seq over tp",
        seq=8,
        dims=DIMS.replace("vocab = 12", "vocab = 16").replace("heads = 4", "heads = 8", 1),
    ),
    "an axis with the name that a factor would have": Plan(
        mesh="tp_0 = 2  tp = 4", shard=f"batch over tp_0  {NO_DP}", ranks=2
    ),
    "one key/value head": evolve(DP_TP, dims=DIMS.replace("kv_heads = 2", "kv_heads = 1")),
    "key/value heads of the query's number": evolve(
        DP_TP, dims=DIMS.replace("kv_heads = 2", "kv_heads = 4")
    ),
    "heads over tp, key/value heads in a later rule": evolve(
        DP_TP, shard="batch over dp  vocab, heads, ffn over tp  kv_heads over tp  seq over tp"
    ),
    "vocabulary whole": evolve(
        DP_TP, shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp"
    ),
    "vocabulary alone": evolve(DP_TP, shard="batch over dp  vocab over tp"),
    "ffn alone": Plan(mesh="dp = 2  tp = 2", shard="batch over dp  ffn over tp", ranks=2),
    "sequence alone": Plan(f"{START} repeat layers {{ {MLP} }} {HEAD}", "tp = 2", "seq over tp"),
    "batch and sequence": Plan(
        f"{START} repeat layers {{ {MLP} }} {HEAD}",
        "dp = 2  cp = 2",
        "batch over dp  seq over cp",
        ranks=2,
    ),
    "batch over the tensor axis too": Plan(
        mesh="dp = 2  tp = 2", shard=f"{NO_DP}  batch over dp, tp", ranks=4
    ),
    "two tensor axes": Plan(
        mesh="tp = 2  ep = 2", shard="vocab, heads, kv_heads over tp  ffn over ep  seq over tp"
    ),
    "parallel block": evolve(DP_TP, body=PARALLEL_BLOCK, shard=ALL_OVER_TP),
    "parallel block, sequence": evolve(DP_TP, body=PARALLEL_BLOCK),
    "tied embedding": evolve(DP_TP, body=LLAMA.replace("@ head[hidden -> vocab]", "@ wte")),
    "tied embedding, vocabulary whole": evolve(
        DP_TP,
        body=LLAMA.replace("@ head[hidden -> vocab]", "@ wte"),
        shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp",
    ),
    "captured value": evolve(
        DP_TP,
        body=f"{START} c = rmsnorm(x, norm0[hidden], eps) repeat layers {{ x = x + c * silu(x)"
        f" {MLP} }} {HEAD}",
    ),
    "captured value alone": evolve(
        DP_TP, body=f"{START} repeat layers {{ y = {SMALL_MLP} }} {HEAD}".replace("y =", "x = x +")
    ),
    "captured parameter": evolve(
        DP_TP,
        body=f"{START} x = rmsnorm(x, g[hidden], eps) repeat layers {{ x = x + rmsnorm(x, g,"
        f" eps) {MLP} }} {HEAD}",
    ),
    "captured matrix": evolve(
        DP_TP,
        body=f"""{START} y = silu(x @ w[hidden -> ffn])
        repeat layers {{ x = x + silu(x @ w) @ u[ffn -> hidden] }}  x = x + y @ v[ffn -> hidden] {HEAD}""",
    ),
    "captured sharded value": evolve(
        DP_TP,
        body=f"{START} y = x @ w[hidden -> ffn] repeat layers {{ x = x + silu(y) @ w_out[ffn ->"
        f" hidden] }} {HEAD}",
    ),
    "carried sharded value": evolve(
        DP_TP,
        body=f"""{START} y = x @ w[hidden -> ffn]
        repeat layers {{ y = y + silu(y)  x = x + y @ u[ffn -> hidden] }}  x = x + y @ v[ffn -> hidden] {HEAD}""",
    ),
    "nested repeats": evolve(
        DP_TP, body=f"{START} repeat blocks {{ repeat layers {{ {MLP} }} {ATTENTION} }} {HEAD}"
    ),
    "nested repeats, captured": evolve(
        DP_TP,
        body=f"""{START} c = rmsnorm(x, norm0[hidden], eps)
        repeat blocks {{ d = c * s[hidden]  repeat layers {{ x = x + silu(x * d) * t[hidden] }} {MLP} }} {HEAD}""",
    ),
    "several repeats": evolve(
        DP_TP, body=f"{START} repeat layers {{ {ATTENTION} }} repeat blocks {{ {MLP} }} {HEAD}"
    ),
    "layers that differ": evolve(
        DP_TP,
        body=f"""{START}
        repeat layers as i {{ if i < 1 {{ {ATTENTION} }} else {{ x = x * g[hidden] }} {MLP} }} {HEAD}""",
    ),
    "several results": evolve(
        DP_TP,
        body=f"""{START}
        repeat layers {{
          a, b, c = split(rmsnorm(x, norm1[hidden], eps) @ w[hidden -> ffn], [kv_heads, hidden, head_dim])
          x = x + silu(a) @ u[kv_heads -> hidden] + tanh(b)
        }} {HEAD}""",
        shard="batch over dp  vocab over tp",
    ),
    "a repeat of one": evolve(DP_TP, dims=DIMS.replace("layers = 2", "layers = 1")),
    "no repeat": evolve(DP_TP, body=f"{START} {ATTENTION} {MLP} {HEAD}"),
    "parameter used twice": evolve(
        DP_TP,
        body=f"""{START}
        repeat layers {{ m = x @ w[hidden -> ffn]  x = x + silu(m + silu(x) @ w) @ u[ffn -> hidden] }} {HEAD}""",
    ),
    "arithmetic on parameters": evolve(
        DP_TP,
        body=f"{START} repeat layers {{ {MLP} + silu(b[hidden] * c[hidden]) * d[hidden] }} {HEAD}",
    ),
    "parameter matrix made of others": evolve(
        DP_TP,
        body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ (u[ffn -> hidden] * s[hidden, ffn])"
        f" {HEAD}",
    ),
    "bias of a column": evolve(
        DP_TP, body=f"{START} x = x + silu(x @ w[hidden -> ffn] + b[ffn]) @ u[ffn -> hidden] {HEAD}"
    ),
    "bias of a row": evolve(
        DP_TP,
        body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden] + b[hidden] {HEAD}",
    ),
    "scale of a row": evolve(
        DP_TP,
        body=f"{START} x = x + silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden] * b[hidden] {HEAD}",
    ),
    "pending sum used twice": evolve(
        DP_TP,
        body=f"{START} y = silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]  x = x + y + silu(y)"
        f" {HEAD}",
    ),
    "pending sum added to itself": evolve(
        DP_TP, body=f"{START} y = silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]  x = y + y {HEAD}"
    ),
    "square": evolve(DP_TP, body=f"{START} y = x * x  x = y * y + x {HEAD}"),
    "positions learned": evolve(
        DP_TP, body=f"x = embedding(tokens, wte[vocab, hidden]) + wpe[seq, hidden] {MLP} {HEAD}"
    ),
    "clipped": evolve(DP_TP, clip=0.1),
    "not clipped": evolve(DP_TP, clip=100.0),
    "a value added to itself": evolve(DP_TP, body=f"{START} x = x + x {HEAD}"),
    "a value added to itself in a repeat": evolve(
        DP_TP, body=f"{START} repeat layers {{ x = x + x + silu(x) {MLP} }} {HEAD}"
    ),
    "a pending sum among others": evolve(
        DP_TP,
        body=f"{START} y = silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]  x = y + x + y {HEAD}",
    ),
    "a sum that a sum and a repeat use": evolve(
        DP_TP,
        body=f"{START} x = x + silu(x)  y = x + c[hidden]  repeat layers {{ {MLP} }}  x = x + y"
        f" {HEAD}",
    ),
    "captured pending sum": evolve(
        DP_TP,
        body=f"{START} y = silu(x @ w[hidden -> ffn]) @ u[ffn -> hidden]  repeat layers {{ x ="
        f" x + y {MLP} }} {HEAD}",
    ),
    "two carried values": evolve(
        DP_TP,
        body=f"{START} y = silu(x) repeat layers {{ t = x  x = y * c[hidden] + silu(y)  y = t"
        f" }} x = x + y {HEAD}",
    ),
    "a carried value that is not used afterwards": evolve(
        DP_TP, body=f"{START} y = silu(x) repeat layers {{ x = x + y  y = y * c[hidden] }} {HEAD}"
    ),
    "a carried value that is the same": evolve(
        DP_TP, body=f"{START} repeat layers {{ x = x }} {MLP} {HEAD}"
    ),
    "tied in a repeat": evolve(
        DP_TP,
        body=f"{START} repeat layers {{ x = x + silu(x @ wte) @ back[vocab -> hidden] }} {HEAD}",
    ),
    "two tables of one vocabulary": evolve(
        DP_TP,
        body=f"x = embedding(tokens, wte[vocab, hidden]) + silu(embedding(tokens, wte)) {HEAD}",
    ),
    "smoothing and z-loss": SMOOTHED,
    "smoothing and z-loss, vocabulary whole": evolve(
        SMOOTHED, shard="batch over dp  heads, kv_heads, ffn over tp  seq over tp"
    ),
    "two losses": evolve(
        DP_TP,
        body=f"""{START} first = cross_entropy(x @ a[hidden -> vocab], labels)
        loss = first + cross_entropy(silu(x) @ b[hidden -> vocab], labels)""",
    ),
    "normed queries": evolve(
        DP_TP,
        body=LLAMA.replace(
            "rope(a @ wq[hidden -> heads, head_dim], theta)", f"rope({NORMED}, theta)"
        ),
    ),
    "few key/value heads with bias": evolve(
        DP_TP,
        dims=DIMS.replace("kv_heads = 2", "kv_heads = 1"),
        body=LLAMA.replace(
            "@ wv[hidden -> kv_heads, head_dim]",
            "@ wv[hidden -> kv_heads, head_dim] + bv[head_dim]",
        ),
    ),
    "dropout": DROPOUT,
    "dropout, three axes, regathered": evolve(
        DROPOUT,
        mesh="replica = 2  dp = 2  tp = 2",
        shard=WITH_SEQ.replace("dp", "replica, dp"),
        ranks=4,
        train="precision = fp64  gathered = regather",
    ),
    "dropout, two key/value heads on four ranks": evolve(
        DROPOUT, mesh="dp = 2  tp = 4", shard=ALL_OVER_TP
    ),
    "dropout, nested repeats, documents": evolve(
        DOCUMENTS,
        body=f"{START} repeat blocks {{ repeat layers {{ {DROPPED} }} {DROPPING} {DROP} }}"
        f" {HEAD}".replace("causal", "causal, documents=documents"),
    ),
    "documents": DOCUMENTS,
    "documents, three axes": evolve(
        DOCUMENTS,
        mesh="replica = 2  dp = 2  tp = 2",
        shard=WITH_SEQ.replace("dp", "replica, dp"),
        ranks=4,
    ),
    "documents, both ways": evolve(
        DOCUMENTS,
        body=DOCUMENTS.body.replace("causal", "full"),
        shard=ALL_OVER_TP,
        word="bidirectional",
    ),
    "documents, windows, regathered": evolve(
        DOCUMENTS,
        body=DOCUMENTS.body.replace("causal", "causal, window=2"),
        train="precision = fp64  gathered = regather",
    ),
    "ffn over two axes": Plan(
        mesh="a = 2  tp = 2", shard="ffn, vocab over a, tp  heads, kv_heads over tp  seq over tp"
    ),
    "ffn and sequence over two axes": Plan(
        f"{START} repeat layers {{ {MLP} }} {HEAD}",
        "a = 2  tp = 2",
        "ffn, vocab over a, tp  seq over a, tp",
    ),
}
