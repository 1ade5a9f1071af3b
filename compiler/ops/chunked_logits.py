"""The logits that a loss computes itself from a product: the operands, and how many logits exist at
a time.

Non-goals: the losses (`fused_loss` for a whole vocabulary on each rank, `fused_parallel_loss` for a
sharded one).
"""

from collections.abc import Sequence
from math import prod

from ..ir import ITEM_BYTES, Op, Type
from .call import Call, Keyword, over_classes
from .protocol import Attribute, Operand, TypingError, takes
from .roles import Roles
from .saved_tensors import Local
from .work import Product, Work

INNER = Attribute("inner", kinds=(tuple,))
PRODUCT = (*takes("x", "w", "labels"), Operand("bias", optional=True))
"""The logits x·w, plus the bias of each class where there is one, and the labels."""


def classes_of(op: Op, weight: Type) -> str:
    """The dim of the logits that counts classes: the dim of the weight that is not contracted."""
    class_dims = [dim for dim in weight.dims if dim not in op.names("inner")]
    if len(class_dims) != 1:
        raise TypingError(
            f"{op.kind} takes a weight with one dim of classes, not [{', '.join(class_dims)}]"
        )
    return class_dims[0]


def tokens_of(op: Op, x: Type) -> tuple[str, ...]:
    """The dims of the operand that are not contracted."""
    return tuple(dim for dim in x.dims if dim not in op.names("inner"))


def product_roles(types: Sequence[Type], op: Op) -> Roles:
    """The roles of a loss that computes its logits."""
    return Roles(classes=classes_of(op, types[1]))


def check(op: Op, x: Type, weight: Type, labels: Type, *bias: Type) -> None:
    """Raises TypingError unless these are the operands of a product and its labels."""
    over, classes = op.names("inner"), classes_of(op, weight)
    for type in bias:
        if (type.dtype, type.dims) != (weight.dtype, (classes,)):
            raise TypingError(f"{op.kind} takes a bias of [{classes}]")
    if x.dtype != weight.dtype or x.dims[-len(over) :] != over or weight.dims != (classes, *over):
        raise TypingError(
            f"{op.kind} contracts the last dims of its operand with those of its weight"
        )
    if labels.dims != tokens_of(op, x):
        raise TypingError(f"{op.kind} takes a label for each of [{', '.join(tokens_of(op, x))}]")


def product_call(local: Local) -> Call:
    """The call of a loss that computes its logits, for its own classes, with a bias if it has
    one.
    """
    weight = local.types[1]
    classes = classes_of(local.op, weight)
    axes = weight.axes_of(classes)
    if len(local.types) > 3:
        return over_classes(local, classes, axes, bias=Keyword(3))
    return over_classes(local, classes, axes)


def logits_work(local: Local, of_x: int = 0, of_w: int = 0, passes: int = 1) -> Work:
    """The work of making logits `passes` times, and of `of_x` and `of_w` products for the gradients
    of x and of w.

    Besides the products, it reads the logits and writes what takes their place.
    """
    x = local.types[0]
    k = prod(local.program.local_size(x, dim) for dim in local.op.names("inner"))
    m, n = local.elements() // k, local.elements(1) // k
    products = (
        (Product(m, n, k),) * passes + (Product(m, k, n),) * of_x + (Product(n, k, m),) * of_w
    )
    return Work(x.dtype, products, bytes=(1 + bool(of_x)) * passes * m * n * local.item)


# ---- a chunk of the logits


def few_columns(columns: int) -> int:
    """The number of classes per chunk of logits: a sixteenth, but enough for large products."""
    return max(4096, -(-columns // (16 * 128)) * 128)


def few_tokens(columns: int) -> int:
    """The number of tokens per chunk of logits: as few as are enough for large products."""
    return 1024


def chunk(local: Local, *, by_tokens: bool) -> tuple[int, int]:
    """The bytes of a chunk of the logits of the first operand and the weight, and the bytes that
    its gradient takes besides.

    A kernel writes the gradient in the place of the logits; plain torch makes exponentials first,
    of a copy in float32 if logits have fewer bits.
    """
    type, weight = local.types[:2]
    tokens = prod(local.program.local_size(type, dim) for dim in tokens_of(local.op, type))
    classes = local.program.local_size(weight, classes_of(local.op, weight))
    if by_tokens:
        elements = min(tokens, few_tokens(classes)) * classes
    else:
        elements = tokens * min(classes, few_columns(classes))
    item, wide = ITEM_BYTES[type.dtype], max(4, ITEM_BYTES[type.dtype])
    if local.runs_kernel:
        return elements * item, 0
    terms = 4 if "cap" in dict(local.op.attrs) else 1 + (item < wide)
    return elements * item, elements * wide * terms
