"""Products of matrices under Triton's interpreter as tensor cores do them, where a kernel asks for
`tf32x3`.

They take the upper 11 of a number's 24 bits; the interpreter alone would multiply in float32,
whatever is asked for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@contextmanager
def emulated() -> Iterator[None]:
    """The sum of three products: of upper parts, and of each upper part with the other factor's
    rest.
    """
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    exact: Any = interpreter_builder.create_dot

    def dot(a: Any, b: Any, sums: Any, precision: Any, *rest: Any) -> Any:
        if precision.name != "TF32x3" or a.data.dtype != np.float32:
            return exact(a, b, sums, precision, *rest)
        first, second = _upper(a.data), _upper(b.data)
        small = first @ _cut(b.data - second) + _cut(a.data - first) @ second
        return TensorHandle(small + first @ second + sums.data, sums.dtype.scalar)

    with patch.object(interpreter_builder, "create_dot", dot):
        yield


def _upper(x: Floats) -> Floats:
    """Rounded to nearest, as `cvt.rna.tf32.f32` does it."""
    return _cut((x.view(np.uint32) + np.uint32(0x1000)).view(np.float32))


def _cut(x: Floats) -> Floats:
    """The value as a tensor core sees it."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
