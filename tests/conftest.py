"""The environment of every test, and the `golden` fixture.

Helpers for forked ranks are in `forked_ranks.py`.
"""

import difflib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings

from helpers.samples import outside_of_samples

if TYPE_CHECKING:
    from helpers.commands import CommandLine

# Both are read when torch is imported.  Without the first, gloo lets collectives of unequal sizes
# or dtypes pass.
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
os.environ["OMP_NUM_THREADS"] = "1"

# Tests are kept compiled, whatever the shell's environment says: to rewrite their asserts takes
# almost as long as all else of a collection.
sys.dont_write_bytecode = False

# A test that plants a defect changes no file: a proof kept from before it would hide the defect.
os.environ["SCALEC_NO_CACHE"] = "1"

# The same examples at every run, and no shrinking: of a random plan it takes longer than a test
# may.  A failure is shrunk with `pytest --hypothesis-profile=shrink`.
settings.register_profile("shrink", derandomize=True, deadline=None)
settings.register_profile(
    "same", settings.get_profile("shrink"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("same")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden` and `--long`."""
    parser.addoption("--long", action="store_true", help="run tests that take minutes, too")
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write golden files instead of comparing with them",
    )


@pytest.hookimpl(tryfirst=True)  # before groups become part of names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is outside of samples as `long`, and leaves out what is `long` unless it is asked
    for.

    The tests of a file run in one process, which compiles what they share once.
    """
    for item in outside_of_samples(items):
        item.add_marker("long")
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    if config.getoption("--long"):
        return
    left = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """Leaves all that is imported to no collector: those of forked ranks would copy it to look
    through it.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what is marked `gpu` on a machine without one."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module")
def calls_uncompared() -> Iterator[None]:
    """For modules that compare what comes out: `TORCH_DISTRIBUTED_DEBUG` is half of what ranks
    do there, or more.
    """
    from helpers.forked_ranks import plain_groups

    with plain_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")
        yield


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_scalec(capsys: pytest.CaptureFixture[str]) -> "CommandLine":
    """`run_scalec(*words)` is the exit status, standard output and standard error of a command."""
    from helpers.commands import CommandLine

    return CommandLine(capsys)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` demands that `text` equals the file `tests/golden/<name>`."""
    update = bool(request.config.getoption("--update-golden"))

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        elif not path.exists():
            pytest.fail(
                f"golden/{name} does not exist: `pytest --update-golden` writes it", pytrace=False
            )
        elif (expected := path.read_bytes().decode()) != text:
            pytest.fail(_difference(name, expected, text), pytrace=False)

    return compare


def _difference(name: str, expected: str, text: str) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(True), text.splitlines(True), f"golden/{name}", "now"
    )
    return f"golden/{name} differs: `pytest --update-golden` accepts the new text\n{''.join(lines)}"
