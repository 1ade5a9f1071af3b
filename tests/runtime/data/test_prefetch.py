"""The thread that makes the next batch: what it is at, whose its errors are, and how it ends."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from scalec.runtime.data.prefetch import ahead

CPU = torch.device("cpu")
LIMIT = 30.0  # seconds, which only a failure takes


def test_the_next_is_made_while_a_step_runs_and_none_beyond_the_end() -> None:
    made, began = list[int](), {number: threading.Event() for number in range(5)}

    def make(number: int) -> int:
        began[number].set()
        made.append(number)
        return 10 * number

    with ahead(make, 5, CPU) as batch:
        for number in range(2, 5):
            assert batch.get_batch(number) == 10 * number
            assert number == 4 or began[number + 1].wait(LIMIT)  # nobody has asked for it
    assert made == [2, 3, 4]


def test_the_thread_computes_alone_and_leaves_others_their_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ahead(lambda _: torch.get_num_threads(), 2, CPU) as found:
            other = ThreadPoolExecutor(1)
            assert (
                found.get_batch(0),
                torch.get_num_threads(),
                other.submit(torch.get_num_threads).result(),
            ) == (
                1,
                3,
                3,
            )
    finally:
        torch.set_num_threads(before)


def test_an_error_is_told_in_the_step_that_needs_the_batch() -> None:
    def make(number: int) -> int:
        if number == 1:
            raise OSError("the disk is gone")
        return number

    with ahead(make, 3, CPU) as batch:
        assert batch.get_batch(0) == 0
        with pytest.raises(OSError, match="the disk is gone"):
            batch.get_batch(1)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_ends_a_run_does_not_wait_for_a_file_that_does_not_answer(
    error: type[BaseException],
) -> None:
    began, answers = threading.Event(), threading.Event()

    def make(number: int) -> int:
        if number == 1:
            began.set()
            answers.wait(LIMIT)
        return number

    def run() -> None:
        with ahead(make, 9, CPU) as batch:
            batch.get_batch(0)
            assert began.wait(LIMIT)
            raise error

    with pytest.raises(error):
        run()
    assert not answers.is_set()
    answers.set()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
