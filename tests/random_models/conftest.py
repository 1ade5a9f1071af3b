"""User ops are looked for beside the plan; texts of plans lie in the working directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="module")
def beside_the_user_ops() -> Iterator[None]:
    """Compiles plans, and imports what is emitted, beside `own_ops.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)
        patch.syspath_prepend(Path(__file__).parent)
        yield
