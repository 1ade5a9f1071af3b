"""User ops are looked for beside the plan; texts of plans lie in the working directory."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.random_models import own_ops

FOLDER = Path(own_ops.__file__).parent


@pytest.fixture(autouse=True, scope="module")
def beside_the_user_ops() -> Iterator[None]:
    """Compiles plans, and imports what is emitted, beside `own_ops.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(FOLDER)
        patch.syspath_prepend(FOLDER)
        yield
