"""Meetings of forked ranks at the job's store."""

import threading

import pytest
import torch.distributed as dist
from tests.helpers.forked_ranks import run_ranks

from scalec.runtime.comm.store import FAILED, job_store, meet
from scalec.runtime.errors import RunError


def _words() -> list[object]:
    rank = dist.get_rank()
    return [
        meet("a", f"word {rank // 2}"),
        meet("a", "same"),
        meet("b", "even" if rank % 2 == 0 else "odd"),
    ]


def test_words_are_known_with_the_ranks_that_brought_them() -> None:
    expected = [{"word 0": [0, 1], "word 1": [2, 3]}, {"same": []}, {"even": [0, 2], "odd": [1, 3]}]
    assert run_ranks(4, _words) == [expected] * 4


def _keys(meetings: int) -> int:
    for number in range(meetings):
        meet("a", f"{number}, of {dist.get_rank()}")
    meet("last", "")
    return job_store().num_keys()


def test_the_store_does_not_grow() -> None:
    assert run_ranks(2, _keys, 50)[0] <= run_ranks(2, _keys, 3)[0]


def _in_two_threads() -> list[object]:
    found, own = list[object](), job_store().clone()
    other = threading.Thread(
        target=lambda: found.append([meet("other", str(number), own) for number in range(20)])
    )
    other.start()
    mine = [meet("a", str(number)) for number in range(20)]
    other.join()
    return [mine, *found]


def test_threads_meet_by_themselves() -> None:
    expected = [{str(number): []} for number in range(20)]
    assert run_ranks(2, _in_two_threads) == [[expected, expected]] * 2


def _waits_in_vain() -> str:
    if dist.get_rank() == 0:
        job_store().add(FAILED, 1)
        return ""
    with pytest.raises(RunError) as told:
        meet("a", "")
    return str(told.value)


def test_nobody_waits_for_a_rank_that_has_failed() -> None:
    assert run_ranks(2, _waits_in_vain) == ["", "another rank has failed"]


def test_a_process_alone_meets_nobody() -> None:
    assert meet("a", "word") == {"word": []}
