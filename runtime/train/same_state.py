"""Compares state that ranks hold alike: once before the first step, once before the first save."""

from hashlib import blake2b

import torch

from ..comm.store import job_store, meet
from ..comm.witness import Witness
from ..errors import RunError
from ..state.engine import TrainState


class SameState:
    """Compares the state that ranks hold alike, by hashes in the job's store: no group of the plan
    takes part.
    """

    def __init__(self, state: TrainState) -> None:
        self._state, self._looks = state, 0

    def require(self, when: str) -> None:
        """RunError on all ranks where two ranks hold different values of state that they should
        hold alike.

        All ranks call it.
        """
        store = job_store()
        if store is None:
            return
        self._looks += 1
        witness = Witness(store)
        faults = list[str]()
        for axes, hashes in _hashes(self._state).items():
            names = blake2b("\n".join(hashes).encode(), digest_size=8).hexdigest()
            difference = witness.difference(f"state/{self._looks}/{axes}/{names}", hashes)
            if difference is not None:
                faults.append(f"`{difference.name}` differs between {difference.ranks}")
        words = [word for word in meet("state", "\n".join(faults)) if word]
        witness.forget()
        if words:
            first, *others = "\n".join(words).splitlines()
            more = f" and {len(others)} more" if others else ""
            raise RunError(
                f"{when} ranks do not hold the same state: {first}{more}",
                "give all nodes the same files, versions and hardware; SCALEC_SANITIZE=1 finds"
                " the first such step",
            )


@torch.no_grad()
def _hashes(state: TrainState) -> dict[str, dict[str, str]]:
    """By axes and by name, the hashes of all boxes that ranks along the axes hold alike."""
    from ..debug.compare import Comparison  # 8 MiB of keys, for the time of a comparison

    comparison = Comparison(state.mesh.device)
    hashes_of_axes = dict[str, dict[str, str]]()
    for axes, boxes in state.get_boxes_by_axes().items():
        filled = [box for box in boxes if box.tensor.numel()]
        if not filled:
            continue
        rows = comparison.hashes([box.tensor for box in filled]).cpu()
        hash_of_box = dict[str, str]()
        for box, row in zip(filled, rows, strict=True):
            hash_of_box[box.name] = row.numpy().tobytes().hex()
        hashes_of_axes[axes] = hash_of_box
    return hashes_of_axes
