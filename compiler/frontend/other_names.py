"""Ops, arguments and values by the names that PyTorch and other programs give them, and how a plan
says the same.

A row is one wish: the names it goes by, in lower case and without underscores, and the help.  Where
no op does it, the help names the way out: usually a function of one's own.  In a help `{name}` is
the name that the plan has.
"""

from collections.abc import Iterable

from ..ops import OPS
from ..syntax.diagnostics import did_you_mean, listing

_ATTENTION = (
    "write attention as a function of your own: "
    "`op my_attention(q[.., s, n, d], k[.., s, n, d], v[.., s, n, d]) -> [.., s, n, d] "
    'over .., n causal s from "my_ops:my_attention"`'
)
_SINKS = _ATTENTION.replace("v[.., s, n, d])", "v[.., s, n, d], sinks[n])")
_ALIBI = (
    _ATTENTION.replace("v[.., s, n, d])", "v[.., s, n, d], head=n)")
    + ", where `head` has the heads' numbers"
)

_OPS = {
    # products, shapes, joins
    "linear matmul mm bmm einsum dot dense outer addmm": (
        "a product is `x @ w[hidden -> ffn]`: `w` is declared there, "
        "by the dims that are summed over and those it gives"
    ),
    "reshape view flatten unflatten squeeze unsqueeze rearrange": (
        "dims have names, so nothing is reshaped: "
        "`x @ wq[hidden -> heads, head_dim]` makes heads at once"
    ),
    "transpose permute swapaxes t": "dims have names, and ops find them by these: leave it out",
    "expand repeatinterleave repeatkv tile broadcastto": (
        "leave it out: dims go by name, and each key/value head serves several query heads"
    ),
    "cat concatenate stack hstack": "write `concat(x, y, as=both)`, where `both` is a dim: "
    "`dims { both = left + right }`",
    "chunk slice narrow unbind gather": "write `split(x, [left, right])`, by dims of the model",
    "pad": "write `vocab = 50257 pad 128` in `dims` to pad a dim",
    "add sub mul multiply div divide neg": "write `x + y`, `x - y`, `x * y` or `x / y`",
    # functions of each number
    "pow square power": "multiply: `x * x`",
    "max maximum": "the larger of two tensors is `relu(x - y) + y`",
    "min minimum": "the smaller of two tensors is `x - relu(x - y)`",
    "abs absolute": "write `relu(x) + relu(-x)`",
    "reciprocal": "a tensor divides a tensor: `y / x`",
    "relu2 squaredrelu relusquared": "write `y = relu(x)` and use `y * y`",
    "quickgelu": "write `x * sigmoid(1.702 * x)`",
    "gelunew gelutanh gelufast gelupytorchtanh newgelu": "write `gelu(x, approximate=tanh)`",
    "swish": "it is called `silu`",
    "swiglu": "write `silu(x @ w_gate[hidden -> ffn]) * (x @ w_up[hidden -> ffn])`",
    "geglu": "write `gelu(x @ w_gate[hidden -> ffn]) * (x @ w_up[hidden -> ffn])`",
    "reglu": "write `relu(x @ w_gate[hidden -> ffn]) * (x @ w_up[hidden -> ffn])`",
    "sqrt": "`sqrt` takes numbers, dims and constants; of a tensor it can be a function of your"
    " own: "
    '`op sqrt(x[..]) -> [..] over .. from "my_ops:sqrt"`',
    "log log2 log1p logsigmoid rsqrt sin cos tan erf softplus mish elu selu celu hardswish"
    " hardsigmoid clamp clip sign "
    "floor round nantonum": "write it as a function of your own: "
    '`op {name}(x[..]) -> [..] over .. from "my_ops:{name}"`',
    "where maskedfill lerp fmod atan2 eq gt lt": "write it as a function of your own: "
    '`op {name}(x[..], y[..]) -> [..] over .. from "my_ops:{name}"`',
    # functions along a dim
    "var variance": "write `mean(x * x, over=hidden)`, of an `x` whose mean is 0",
    "std norm l2norm normalize": (
        "`rmsnorm(x, norm[hidden], eps)` divides by the root mean square; else write a "
        'function of your own: `op {name}(x[.., d]) -> [.., d] over .. from "my_ops:{name}"`'
    ),
    "logsumexp prod argmax argsort sort cumprod": (
        "write it as a function of your own, which needs the dim whole: "
        '`op {name}(x[.., d]) -> [.., d] over .. from "my_ops:{name}"`'
    ),
    "conv conv1d causalconv1d cumsum scan associativescan selectivescan mamba mamba2 ssm"
    " retention rwkv "
    "gateddeltanet deltanet lstm gru rnn": (
        "write it as a function of your own that looks back along the sequence: "
        '`op {name}(x[.., s, d]) -> [.., s, d] over .., d causal s from "my_ops:{name}"`'
    ),
    # parts of models
    "scaleddotproductattention sdpa multiheadattention flashattention flashattn flashattnfunc"
    " flashattnvarlenfunc "
    "flexattention selfattention memoryefficientattention": (
        "write `attention(q, k, v, mask=causal)`, of queries, keys and values with heads"
    ),
    "crossattention": "there is one sequence, `seq`: queries, keys and values come from it alone",
    "alibi relativepositionbias t5bias": _ALIBI,
    "rotary rotaryembedding applyrotarypos applyrotaryemb applyrotaryposemb": (
        "it is called `rope`: `rope(x @ wq[hidden -> heads, head_dim], theta)`"
    ),
    "groupnorm batchnorm instancenorm": "there are `rmsnorm(x, norm[hidden], eps)` and "
    "`layernorm(x, norm[hidden], bias[hidden], eps)`",
    "route router top topk moe experts mixtureofexperts sparsemoe": "write "
    "`route y to experts by top(y @ router[hidden -> experts], 2) { … }`, a statement whose"
    " braces are an expert",
    "lora loralinear": "write `x @ w[hidden -> ffn] + x @ a[hidden -> rank] @ b[rank -> ffn]`; "
    "all parameters are trained, `w` too",
    "onehot": "an embedding looks rows up: `embedding(tokens, wte[vocab, hidden])`",
    "arange linspace": (
        "positions are a parameter, `x + wpe[seq, hidden]`, or `rope(q, theta)`; an op of your"
        " own may "
        "ask for them: `head=n` in its signature"
    ),
    "ones zeros empty full rand randn tensor parameter": (
        "a tensor is a parameter, declared where it is used: `x + b[hidden]`, with `init b ~ zeros`"
    ),
    "detach stopgradient nograd": "gradients flow through every op; an optimizer's group with "
    "`lr_scale = 0  weight_decay = 0` keeps parameters as they are",
    # losses
    "logsoftmax": "`cross_entropy` takes logits as they are",
    "nllloss crossentropyloss ce linearcrossentropy": (
        "write `cross_entropy(logits, labels)`, of logits as they are"
    ),
    "mse mseloss l1loss bce bceloss bcewithlogits kldiv huberloss contrastive": (
        "the loss is `cross_entropy(logits, labels)` or a sum of such; there are no other losses"
    ),
    # what is no op
    "print": "a plan prints nothing; `scalec ir` shows each value with its dims",
    "checkpoint remat": "write `recompute = full` in `train`, or `selective(attention)`",
    "compile": "write `compile = on` in `train`",
    "to float half bfloat16 cast type": (
        "write `precision = bf16` in `train`; ops keep statistics in fp32"
    ),
    "allreduce allgather reducescatter alltoall broadcast send recv": (
        "leave it out: the rules of `shard` say where dims lie, and scalec inserts the collectives"
    ),
}
"""Ops that a plan has by another name or not at all."""

_ARGUMENTS = {
    "dim axis dims": "dims go by name, as in `over=hidden`",
    "iscausal causal attnmask attentionmask": "write `mask=causal` or `mask=full`",
    "inplace training keepdim out dtype device": "leave it out",
    "reduction": (
        "leave it out: a loss is the sum over tokens, which the step divides by their number"
    ),
    "ignoreindex": "leave it out: labels below 0 are ignored",
    "labelsmoothing": "it is called `smoothing`",
    "zloss zlossweight": "it is called `z`",
    "weight classweights": "each token counts the same; labels below 0 do not count",
    "enablegqa": "leave it out: each key/value head serves the same number of query heads",
    "base ropetheta": "it is called `theta`",
    "implementation backend attnimplementation useflash": (
        "leave it out: torch chooses flash attention where it can"
    ),
}
"""Arguments of any op."""

_ATTENTION_ARGUMENTS = {
    "bias attnbias positionbias relativepositionbias scoremod": _ATTENTION,
    "alibi alibislopes": _ALIBI,
    "sinks sink softmaxoffset": _SINKS,
    "softmaxscale scaling": "it is called `scale`",
    "logitcap logitscap attnlogitsoftcapping logitssoftcap": "it is called `softcap`",
    "slidingwindow windowsize localwindow": "it is called `window`",
    "cuseqlens seqlens maxseqlen blockmask": (
        "add the input `documents[batch, seq]` and write `documents=documents`"
    ),
    "pastkeyvalue pastkeyvalues kvcache usecache cache": (
        "leave it out: a plan trains, and keeps no keys"
    ),
}
"""Arguments of `attention` alone."""

_BIAS = "add it: `… + b[ffn]`, with `init b ~ zeros`"
"""The help for `bias=` of any other op."""

_CHOICES = {
    "relative t5": _ATTENTION,
    "alibi": _ALIBI,
    "sink sinks": _SINKS,
    "prefix prefixlm": "tokens of a prefix see each other under no mask here; " + _ATTENTION,
    "slidingwindow sliding local window swa": "write `mask=causal, window=4096`",
    "bidirectional none no off noncausal": "write `mask=full`",
    "lowertriangular tril autoregressive decoder": "write `mask=causal`",
    "document documents blockdiagonal packed": (
        "write `mask=causal, documents=documents`, and add the input "
        "`documents[batch, seq]` to the model"
    ),
    "erf exact": "leave `approximate` out",
}
"""Words for choices: masks, approximations."""

_VALUES = {
    "None": "there is no `None`: arguments with a default may be left out",
    "True False true false": "no setting or argument is true or false: choices have names",
    "input_ids inputs input ids": "the model's inputs are called `tokens` and `labels`",
    "targets target": "the model's inputs are called `tokens` and `labels`",
    "positions position_ids pos": "learned positions are a parameter: `x + wpe[seq, hidden]`",
}
"""Values and inputs, by the names as they are written."""

EXAMPLES = {
    "attention": "attention(q, k, v, mask=causal)",
    "concat": "concat(x, y, as=both)",
    "cross_entropy": "cross_entropy(logits, labels)",
    "dropout": "dropout(x, 0.1)",
    "embedding": "embedding(tokens, wte[vocab, hidden])",
    "layernorm": "layernorm(x, norm[hidden], bias[hidden], eps)",
    "leaky_relu": "leaky_relu(x, 0.01)",
    "mean": "mean(x, over=hidden)",
    "rmsnorm": "rmsnorm(x, norm[hidden], eps)",
    "roll": "roll(x, 1, over=hidden)",
    "rope": "rope(q, theta)",
    "softcap": "softcap(x, 30)",
    "split": "split(x, [left, right])",
    "sum": "sum(x, over=hidden)",
}
"""How ops with more than one argument are written."""


def _by_name(rows: dict[str, str]) -> dict[str, str]:
    """The rows, with a row for each of the names that one is for."""
    help_by_name: dict[str, str] = {}
    for names, help in rows.items():
        for name in names.split():
            help_by_name[name] = help
    return help_by_name


_OP_HELP, _CHOICE_HELP, _VALUE_HELP = map(_by_name, (_OPS, _CHOICES, _VALUES))
_ARGUMENT_HELP, _ATTENTION_HELP = map(_by_name, (_ARGUMENTS, _ATTENTION_ARGUMENTS))


def _fold(name: str) -> str:
    return name.lower().replace("_", "")


def is_foreign_op(op: str) -> bool:
    """Whether another program has an op of this name."""
    return _fold(op) in _OP_HELP


def help_for_op(name: str, op_names: Iterable[str]) -> str:
    """How a plan writes the op that is called `name` elsewhere, or else the ops there are."""
    plain = {_fold(op): op for op in op_names}
    word = _fold(name)
    if word in plain:
        return f"did you mean `{plain[word]}`?"
    if word in _OP_HELP:
        return _OP_HELP[word].replace("{name}", name)
    user_op_help = 'another function can be an op of your own: `op … from "my_ops:NAME"`'
    return (
        did_you_mean(name, plain.values())
        or f"ops are {listing(sorted(plain.values()))}; {user_op_help}"
    )


def help_for_argument(op: str, name: str, argument_names: Iterable[str]) -> str:
    """How a plan writes the argument of `op` that is called `name` elsewhere; "" where it is
    like none.
    """
    word = _fold(name)
    if op == "attention" and word in _ATTENTION_HELP:
        return _ATTENTION_HELP[word]
    if word == "bias":
        return _BIAS
    return _ARGUMENT_HELP.get(word) or did_you_mean(name, argument_names) or help_for_call(op)


def help_for_choice(name: str, choices: Iterable[str]) -> str:
    """How a plan says a word that is none of the choices; "" where it is like none."""
    return did_you_mean(name, choices) or _CHOICE_HELP.get(_fold(name)) or help_for_value(name)


def help_for_value(name: str) -> str:
    """The plan's way to write a value or an input of Python's; "" for any other name."""
    return _VALUE_HELP.get(name, "")


def help_for_call(op: str) -> str:
    """How a call of `op` is written; "" where its name alone says so."""
    return f"as in `{EXAMPLES[op]}`" if op in EXAMPLES else ""


assert EXAMPLES.keys() <= OPS.keys(), "other_names: an example of an op that does not exist"
