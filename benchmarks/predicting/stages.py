"""How frameworks cut layers into stages."""

from itertools import accumulate


def stage_layers(layers: int, ranks: int, chunks: int, head: float | None) -> list[float]:
    """The layers of each rank of a pipeline.

    With `head`, its cost in layers, a stage ends as soon as all so far cost their part of the
    whole; else all have as many, and if they cannot, embedding and head take the place of a layer
    each, or the first ranks have one more.
    """
    if head is not None and ranks > 1:
        return _balanced(layers, ranks, head)
    if layers % (ranks * chunks) and ranks > 1 and not (layers + 2) % (ranks * chunks):
        each = (layers + 2) / ranks
        return [each - 1, *[each] * (ranks - 2), each - 1]
    if layers % ranks:
        return [float(layers // ranks + (rank < layers % ranks)) for rank in range(ranks)]
    return [layers / ranks] * ranks


def _balanced(layers: int, ranks: int, head: float) -> list[float]:
    so_far, found, rank = [*accumulate([1.0] * layers)], [0.0] * ranks, 0
    for cost in so_far:
        found[rank] += 1
        if cost > (layers + head) * (rank + 1) / ranks:
            rank = min(rank + 1, ranks - 1)
    return found
