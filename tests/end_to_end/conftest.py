"""Ranks' calls are compared in `test_crossings`, and with the plan where they are recorded;
elsewhere, numbers are.
"""

import pytest


@pytest.fixture(autouse=True, scope="module")
def uncompared(request: pytest.FixtureRequest) -> None:
    """Everywhere but in `test_crossings`."""
    if request.path.name != "test_crossings.py":
        request.getfixturevalue("calls_uncompared")
