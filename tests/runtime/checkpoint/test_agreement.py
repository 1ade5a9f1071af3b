"""Words that one rank of a node makes for all of its ranks."""

import os

import torch.distributed as dist

from helpers.forked_ranks import run_ranks
from scalec.runtime.checkpoint.agreement import word_of_node
from scalec.runtime.errors import RunError


def _words(fails: int) -> tuple[str, list[int]]:
    """Two nodes of two ranks: this rank's word or mistake, and which ranks have made one."""
    rank, made = dist.get_rank(), list[int]()
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank % 2}")

    def word() -> str:
        made.append(rank)
        if rank == fails:
            raise RunError("cannot read")
        return f"of {rank}"

    try:
        return word_of_node(word), made
    except RunError as error:
        return str(error), made


def test_one_rank_of_a_node_makes_the_word() -> None:
    """A rank without one has that of the first node, so that another node's first rank is the
    one that differs.
    """
    assert run_ranks(4, _words, -1) == [("of 0", [0]), ("of 0", []), ("of 2", [2]), ("of 0", [])]
    assert run_ranks(4, _words, 2) == [
        ("cannot read", [0]),
        ("cannot read", []),
        ("cannot read", [2]),
        ("cannot read", []),
    ]
