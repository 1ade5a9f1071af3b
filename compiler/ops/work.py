"""The work of an op on one rank, which its time follows from: matrix products, attention, and
memory that is moved.

Non-goals: seconds, which need a GPU (`analysis.time`); what is communicated (`messages`).
"""

from collections.abc import Callable
from math import prod

from attrs import frozen

from ..ir import ITEM_BYTES, Type
from .saved_tensors import Local


@frozen
class Product:
    """`batch` products [m, k] · [k, n]."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def elements(self) -> int:
        """Elements of both factors and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@frozen
class Scores:
    """Attention in `heads` heads of all sequences: each with `pairs` pairs of query and key that
    the mask lets through.

    width and value_width are the sizes of a head's keys and values.  `backward` makes each score
    once more.  `own` are the pairs with a rank's own keys, of attention that does these first and
    then the pairs with keys of other ranks.  `torch_picks` where torch picks the kernel by the GPU;
    all other attention runs by the algorithm of FlashAttention-2.
    """

    heads: int
    length: int
    pairs: int
    width: int
    value_width: int
    backward: bool = False
    own_pairs: int = 0
    torch_picks: bool = False

    @property
    def operations(self) -> int:
        """Multiplications and additions: two products forward, five backward."""
        of_keys, of_values = (3, 2) if self.backward else (1, 1)
        return 2 * self.heads * self.pairs * (of_keys * self.width + of_values * self.value_width)


@frozen
class Work:
    """The work of an op.

    dtype    element type of the products and of attention
    bytes    read and written in memory by what is neither
    kernels  how many kernels are started
    """

    dtype: str = ""
    products: tuple[Product, ...] = ()
    scores: Scores | None = None
    bytes: int = 0
    kernels: int = 1

    @property
    def operations(self) -> int:
        """Operations of products and attention."""
        operations = sum(product.operations for product in self.products)
        if self.scores:
            operations += self.scores.operations
        return operations


WorkOf = Callable[[Local], Work]


def size(local: Local, type: Type) -> int:
    """The bytes of a value on this rank."""
    return local.program.elements(type) * ITEM_BYTES[type.dtype]


def memory_work(local: Local) -> Work:
    """The work of an op that reads its operands and writes its results, in one kernel."""
    results = [value.type for value in local.op.outputs]
    return Work(bytes=sum(size(local, type) for type in (*local.types, *results)))


def no_work(local: Local) -> Work:
    """The work of an op that computes nothing."""
    return Work(kernels=0)


def product(local: Local) -> Work:
    """The work of a product of the first two operands, summed over the dims `over`."""
    x, w = local.types[:2]
    over, result = local.op.names("over"), local.op.outputs[0].type
    k = prod(local.program.local_size(x, dim) for dim in over)
    n = prod(local.program.local_size(w, dim) for dim in w.dims if dim not in over)
    return Work(result.dtype, (Product(local.program.elements(result) // n, n, k),))
