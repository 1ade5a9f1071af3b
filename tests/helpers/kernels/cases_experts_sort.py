"""The order of rows against its twin, to the last index."""

import torch

from scalec.runtime import Experts, Mesh, sort_by_expert
from scalec.runtime.kernels import SortByExpert, Tile

SIZES = [(1, 1, 1), (5, 2, 3), (40, 8, 16), (300, 2, 100), (33, 1, 128), (0, 2, 4)]
"""Tokens, k, experts."""
CHUNK = Tile(rows=128, warps=4, columns=64)


def case_sizes(device: str) -> None:
    for tokens, k, count in SIZES:
        for share in (1, 2):
            experts = Experts(Mesh({}, device), count)
            experts.groups = -(-count // share)  # of the others there are no rows here
            experts.slots.clamp_(max=experts.groups)
            draws = torch.rand(tokens, count, generator=torch.Generator().manual_seed(tokens)) - 0.1
            ids = draws.argsort(-1)[:, :k].masked_fill(draws[:, :k] < 0, -1).to(device)
            found = SortByExpert({count: Tile(rows=64, warps=4, columns=16)})(ids, experts)
            for one, other in zip(
                vars(found).values(), vars(sort_by_expert(ids, experts)).values(), strict=True
            ):
                assert one is other or torch.equal(one, other)


def case_all_to_one_expert(device: str) -> None:
    experts, ids = Experts(Mesh({}, device), 3), torch.full((200, 1), 2, device=device)
    assert torch.equal(SortByExpert({3: CHUNK})(ids, experts).choices.cpu(), torch.arange(200))


def examples(device: str, dtype: torch.dtype) -> None:
    """The sizes of Qwen3-30B-A3B and DeepSeek-V3."""
    for count in (128, 256):
        experts = Experts(Mesh({}, device), count)
        SortByExpert({count: CHUNK})(
            torch.empty(4096, 8, dtype=torch.int64, device=device), experts
        )
