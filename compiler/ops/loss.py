"""Cross entropy, summed over tokens; over a sharded vocabulary as a maximum and two sums (Shoeybi
et al. 2019, 3).

No rank ever holds all logits.  The loss is a sum: the division by the step's count of valid tokens
belongs to the step.  The mean that label smoothing takes is part of the label's sum, so that it
costs no collective of its own.
"""

from collections.abc import Callable, Sequence

from ..ir import MAXIMUM, Op, Type, Value
from .call import Call, over_classes
from .protocol import Attribute, OpDef, Operand, Shape, TypingError, Vjp, takes, total, wide
from .roles import last_is_classes
from .saved_tensors import Local, Saved

SMOOTHING = Attribute(
    "smoothing",
    default=0.0,
    range=(lambda value: 0 <= value < 1, "from 0 to below 1, for instance 0.1"),
)
Z_LOSS = Attribute("z_loss", default=0.0)
Z = Attribute("z", default=0.0, range=(lambda value: value >= 0, "0 or above, for instance 1e-4"))
CAP = Attribute("cap", default=0.0, implied=True)
"""The attribute of losses that bound their logits themselves, as a softcap before them in a
plan does.
"""


def _token_total(types: Sequence[Type], op: Op) -> list[Shape]:
    logits, labels = types
    if not logits.dims or logits.dims[:-1] != labels.dims:
        raise TypingError(f"cross_entropy takes logits of dims [{', '.join(labels.dims)}, classes]")
    return total(types, op)


def _parts_total(types: Sequence[Type], op: Op) -> list[Shape]:
    if (len(types) == 4) != (Z_LOSS.name in dict(op.attrs)):
        raise TypingError("token_loss takes the peak where it has a z_loss, and only there")
    return total(types, op)


def _per_token(types: Sequence[Type], op: Op) -> list[Shape]:
    return [(wide(types[0].dtype), types[0].dims[:-1])]


def _classes(types: Sequence[Type], op: Op) -> frozenset[str]:
    """The dim that has to be whole, unless the op is expanded."""
    logits = next(t for t in types if t.dims)
    return frozenset(logits.dims[-1:])


def _expand(op: Op, fresh: Callable[[str], str], type_of: Callable[[str], Type]) -> list[Op]:
    """max_logit and local_softmax_stats work on the classes too; token_loss has none, and is
    invariant there.
    """
    (logits, labels), (loss,) = op.inputs, op.outputs
    attrs, span = dict(op.attrs), op.span
    classes = type_of(logits).dims[-1]
    items = op.names("work")
    work = ("work", items)
    token_work = ("work", tuple(item for item in items if not item.endswith(f":{classes}")))
    token = Type(loss.type.dtype, type_of(logits).dims[:-1])
    m = Value(fresh("logits_max"), token)
    z = Value(fresh("sum_exp"), token)
    t = Value(fresh("label_logit"), token)
    parts_attrs, token_attrs = (work,), (token_work,)
    if SMOOTHING.name in attrs:
        parts_attrs = ((SMOOTHING.name, attrs[SMOOTHING.name]), work)
    token_inputs = (z.name, t.name, labels)
    if "z" in attrs:
        token_attrs = ((Z_LOSS.name, attrs["z"]), token_work)
        token_inputs = (*token_inputs, m.name)
    return [
        Op("max_logit", (logits,), (m,), (work,), span=span),
        Op("local_softmax_stats", (logits, m.name, labels), (z, t), parts_attrs, span=span),
        Op("token_loss", token_inputs, (loss,), token_attrs, span=span),
    ]


# ---- what autograd keeps, and what the functions hold while they run


def _parts_saves(local: Local) -> Saved:
    """The logits and their peak; which logit is the label's, and where it is not of this rank."""
    tokens = local.elements(2)
    return Saved(operands=(0, 1), others=(("label", 8 * tokens), ("label elsewhere", tokens)))


def _token_saves(local: Local) -> Saved:
    """z, and which tokens have no label; with a z-loss, what is squared."""
    squared = (("log z + peak", local.wide_bytes()),) if len(local.types) > 3 else ()
    return Saved(operands=(0,), others=(*squared, ("no label", local.elements())))


def _entropy_saves(local: Local) -> Saved:
    """torch's own: all log-probabilities, and a sum of weights; or the parts, where there are
    smoothing or a z-loss.
    """
    tokens = local.elements(1)
    if not (local.kernels or local.op.attrs):
        classes = local.program.valid(local.types[0].dims[-1])
        log = ("log softmax", tokens * classes * local.wide)
        return Saved(others=(log, ("label", 8 * tokens), ("weight", local.wide)))
    bytes_per_token = {"peak": local.wide}
    if not local.kernels:
        bytes_per_token |= {"label": 8, "label elsewhere": 1}
    bytes_per_token |= {"z": local.wide, "no label": 1}
    if "z" in dict(local.op.attrs):
        bytes_per_token["log z + peak"] = local.wide
    others = tuple((what, size * tokens) for what, size in bytes_per_token.items())
    return Saved(operands=(0,), others=others)


def _below(local: Local) -> int:
    """The bytes of a copy of logits in few bits, or with padding; where there are parts, of
    logits − peak.
    """
    if local.kernels:
        return in_pass(local)
    classes = local.types[0].dims[-1]
    padded = local.program.valid(classes) < local.program.size(classes)
    copies = local.op.attrs or padded or local.bytes() < local.wide_bytes()
    return local.wide_bytes() if copies else 0


def in_pass(local: Local, back: bool = False) -> int:
    """The bytes of a pass over the logits.

    A kernel reads logits once; its twin in plain torch makes exponentials of all, of a copy if they
    have few bits, and bounds them before.
    """
    if local.runs_kernel:
        return 0
    type, narrow = local.types[0], local.is_narrow
    classes = type.dims[-1]
    terms = 1 + narrow
    if CAP.name in dict(local.op.attrs):
        terms = 4 if back else 2 + narrow
    columns = local.program.local_size(type, classes)
    return terms * local.wide_bytes() // columns * min(columns, local.program.valid(classes))


def _conversion_bytes(local: Local) -> int:
    """The bytes of logits of fewer bits as float32, for a sum with float32: on the CPU torch
    converts them first, on CUDA on the way.
    """
    return local.wide_bytes() if local.device == "cpu" and local.is_narrow else 0


def _gradient_wide(local: Local) -> int:
    """The gradient before it is brought to the logits' element type; for torch's own cross entropy
    the gradient of log-probabilities too.
    """
    wide, result = local.wide_bytes(), local.bytes()
    is_whole_loss = local.op.kind == CROSS_ENTROPY.name
    if is_whole_loss and local.kernels:
        return in_pass(local, back=True)
    if is_whole_loss and not local.op.attrs:
        return 2 * wide - result
    most = wide + _conversion_bytes(local) - result
    return max(most, wide) if result < wide else max(most, 0)


def call_for_own_classes(local: Local) -> Call:
    """The call of an op on logits of this rank's classes."""
    logits = local.types[0]
    return over_classes(local, logits.dims[-1], logits.axes_of(logits.dims[-1]))


def _largest(local: Local) -> Call:
    """Where no class is padding, the logits alone."""
    call = call_for_own_classes(local)
    return call if call.options else Call()


CROSS_ENTROPY = OpDef(
    "cross_entropy",
    "The sum over tokens of log Z − (1 − s) · logits[label] − s · mean(logits) + z · (log Z)²,"
    " Z = Σ exp(logits); a"
    " negative label counts nothing.  s is `smoothing` (Szegedy et al. 2016), z PaLM's z-loss"
    " (Chowdhery et al. 2022).",
    _token_total,
    operands=(Operand("logits"), Operand("labels", input_name="labels")),
    attributes=(SMOOTHING, Z, CAP),
    roles=last_is_classes,
    vjp=Vjp(workspace=_gradient_wide),
    unsharded_dims=_classes,
    expand=_expand,
    function="cross_entropy",
    torch="cross_entropy",
    call=call_for_own_classes,
    saves=_entropy_saves,
    workspace=_below,
    user_visible=True,
)

MAX_LOGIT = OpDef(
    "max_logit",
    "The largest logit; no gradient, since the loss does not depend on it.",
    _per_token,
    operands=takes("logits"),
    contracts=MAXIMUM,
    function="max_logit",
    torch="max_logit",
    call=_largest,
)

SOFTMAX_PARTS = OpDef(
    "local_softmax_stats",
    "Of this rank's classes: z = Σ exp(logits − peak), and t = logits[label] − peak, or 0 for"
    " a label elsewhere; with"
    " smoothing s, t is (1 − s) of that and s of Σ (logits − peak) / classes, counting those"
    " of all ranks.",
    lambda types, op: _per_token(types, op) * 2,
    operands=takes("logits", "peak", "labels"),
    attributes=(SMOOTHING,),
    roles=last_is_classes,
    vjp=Vjp(wrt=(0,), workspace=_gradient_wide),
    function="local_softmax_stats",
    torch="local_softmax_stats",
    call=call_for_own_classes,
    saves=_parts_saves,
    workspace=lambda local: local.wide_bytes() + _conversion_bytes(local),
)

PEAK = Operand("peak", optional=True)

TOKEN_LOSS = OpDef(
    "token_loss",
    "The sum over tokens with a label of log z − t + z_loss · (log z + peak)².",
    _parts_total,
    operands=(*takes("z", "t", "labels"), PEAK),
    attributes=(Z_LOSS,),
    vjp=Vjp(wrt=(0, 1), unread=(1,)),
    function="token_loss",
    torch="token_loss",
    saves=_token_saves,
)
