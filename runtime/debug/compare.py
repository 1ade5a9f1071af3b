"""Checks that tensors are bitwise equal on all ranks of an axis; if not, names the first difference
and its ranks.

A check is one all-gather of hashes, 24 bytes for each tensor and rank.  Where hashes differ, two
more find the element.

A tensor's bits are read as words w of at most 32 bits, in blocks of 2^18.  The hash of a block is Σ
k_i·w_i mod 2^64 with odd random keys k_i of 64 bits, once with each of two sets of keys.  The hash
of the tensor is the hash of its blocks' hashes, with keys of their own.

A single word that differs is always noticed, since no k_i·(w_i − v_i) is 0 mod 2^64.  Several are
missed with probability at most 2^-32 for each set: with all keys but one fixed, the last has 2^63
values, and the difference it multiplies, below 2^32, lets at most 2^31 of them give 0.
(Multilinear hashing: Carter and Wegman, 1979; Lemire and Kaser, Computer Journal 57, 2014.)  So
the probability is 2^-64 for the blocks, and 2^-64 for their hashes.

Sums of integers mod 2^64 do not depend on their order: the hash is the same on CPUs and GPUs, in
any launch.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..comm import c10d
from ..comm.mesh import Axis, Copies
from .source_lines import first_use

BLOCK = 1 << 18  # words; two products of 8 bytes per word are in memory at the same time
# by the bytes of an element; larger ones are several words
_WORDS = {1: torch.uint8, 2: torch.int16}


def words(x: Tensor) -> Tensor:
    """The bits of x as integers of at most 32 bits, in order; a view if x is contiguous."""
    return x.detach().contiguous().view(-1).view(_WORDS.get(x.element_size(), torch.int32))


def blocks(words: Tensor) -> tuple[Tensor, ...]:
    """Splits words into blocks that are hashed together; no blocks for no words."""
    if not len(words):
        return ()
    return cast(Any, words).split(BLOCK)


def _hash(words: Tensor, keys: Tensor) -> Tensor:
    """[2] int64: the sums of words times keys, one for each set of keys."""
    assert len(words) <= keys.shape[1], "fingerprint: more blocks than keys"
    return (keys[:, : len(words)] * words).sum(1)


_SHOWN = 8  # ranks of a list


@dataclass(frozen=True, slots=True)
class Difference:
    """The first of several tensors that is not the same on all ranks: its number, and the index of
    its first element that differs.

    `index` is row-major; None where shapes or element types differ.  `ranks` says in words which
    ranks differ, and their values.
    """

    number: int
    index: int | None
    ranks: str


class Comparison:
    """Compares tensors of one device, by hashes of their bits."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same keys on every rank
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 2, BLOCK), generator=generator)
        self._device, (self._blocks, self._whole) = device, (keys | 1).to(device)

    @torch.no_grad()
    def first(self, values: Sequence[Tensor], axis: Axis) -> Difference | None:
        """The first difference, or None; the same on all ranks of the axis, which call it alike."""
        if axis.size == 1 or not values:
            return None
        with c10d.hide_from_recorders():
            rows = _gather(self.hashes(values), axis)
            differing = (rows != rows[0]).any(0).any(-1)
            if not differing.any():
                return None
            number = int(differing.nonzero()[0])
            return self._locate(number, values[number], rows[:, number], axis)

    def first_copy(self, copies: Sequence[Copies], axis: Axis, model: nn.Module) -> str:
        """Words for the first of a model's copies that differs over the axis: its name, its ranks
        and the line that uses it; "" if none differs.
        """
        difference = self.first([copy.tensor for copy in copies], axis)
        if difference is None:
            return ""
        copy = copies[difference.number]
        parameter, index = copy.element(difference.index or 0)
        words = differs(f"{copy.prefix}{parameter}{index}", axis, difference)
        place = first_use(model, parameter)
        if place:
            words += f"; used at {place}"
        return words

    @torch.no_grad()
    def first_exchange(self, rows_to: Sequence[int], rows_from: Sequence[int], axis: Axis) -> str:
        """Words for the first pair of ranks where one sends another number of rows than the other
        takes; "" if there is none.

        `rows_to` and `rows_from` are this rank's numbers of rows, by rank of the axis.
        """
        with c10d.hide_from_recorders():
            own_rows = torch.tensor([rows_to, rows_from], device=self._device)
            rows_sent, rows_taken = _gather(own_rows, axis).unbind(1)
        differing = (rows_sent != rows_taken.mT).nonzero()
        if not len(differing):
            return ""
        source, target = cast(Any, differing[0]).tolist()
        ranks = axis.ranks()
        return (
            f"rank {ranks[source]} sends {int(rows_sent[source, target])} rows to rank"
            f" {ranks[target]}, which takes {int(rows_taken[target, source])}"
        )

    @torch.no_grad()
    def hashes(self, values: Sequence[Tensor]) -> Tensor:
        """[values, 3] int64: two hashes of the bits of each tensor, one of its type and shape."""
        with c10d.hide_from_recorders():
            return torch.stack([self._hash(x) for x in values])

    def _hash(self, x: Tensor) -> Tensor:
        blocks = self._hash_blocks(x).view(-1)
        layout = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
        return torch.cat((_hash(words(blocks), self._whole), blocks.new_tensor([layout])))

    def _hash_blocks(self, x: Tensor) -> Tensor:
        """[blocks, 2] int64: two hashes of the bits of each block of `words(x)`."""
        hashes = [_hash(part, self._blocks) for part in blocks(words(x))]
        if not hashes:
            return self._blocks.new_zeros(1, 2)
        return torch.stack(hashes)

    def _locate(self, number: int, x: Tensor, rows: Tensor, axis: Axis) -> Difference:
        """The first element of x that differs, and which ranks have which value, by the `rows` of
        the ranks' hashes.
        """
        ranks, kinds = axis.ranks(), [tuple(row) for row in cast(Any, rows).tolist()]
        parties = _parties(kinds, ranks)
        if len({kind[-1] for kind in kinds}) > 1:
            return Difference(number, None, f"{parties}, in shape or element type")
        index, bits = self._first_element(x, axis)
        most_common, _ = Counter(kinds).most_common(1)[0]
        one = kinds.index(most_common)
        other = int((bits != bits[one]).any(-1).nonzero()[0])
        values = list[str]()
        for place in (one, other):
            value = bits[place].clone().view(x.dtype).item()
            values.append(f"{value} on rank {ranks[place]}")
        return Difference(number, index, f"{parties}, {' and '.join(values)}")

    def _first_element(self, x: Tensor, axis: Axis) -> tuple[int, Tensor]:
        """The index of the first element whose bits differ, and these bits, [ranks, bytes]."""
        blocks = _gather(self._hash_blocks(x), axis)
        block = int((blocks != blocks[0]).any(0).any(-1).nonzero()[0])
        part = _gather(words(x)[block * BLOCK : (block + 1) * BLOCK].view(torch.uint8), axis)
        size = x.element_size()
        element = int((part != part[0]).any(0).nonzero()[0]) // size
        index = block * BLOCK * words(x).element_size() // size + element
        return index, part[:, element * size : (element + 1) * size]


def differs(name: str, axis: Axis, difference: Difference) -> str:
    """A difference in words."""
    return f"{name} is not the same over {axis.name}: {difference.ranks}"


def _gather(x: Tensor, axis: Axis) -> Tensor:
    """[ranks, …]: x of each rank of the axis."""
    out = x.new_empty((axis.size, *x.shape))
    axis.asides += 1
    c10d.all_gather(out.view(-1), x.contiguous().view(-1), axis.group)
    return out


def _parties(kinds: Sequence[object], ranks: Sequence[int]) -> str:
    """`rank 3 differs from the other 7`, or `rank 0 differs from rank 1` where neither is in
    the majority.
    """
    (most, size), *others = Counter(kinds).most_common()
    if size > others[0][1]:
        odd = [rank for kind, rank in zip(kinds, ranks, strict=True) if kind != most]
        return f"{_ranks(odd)} from the other {size}"
    parties: dict[object, list[int]] = {}
    for kind, rank in zip(kinds, ranks, strict=True):
        parties.setdefault(kind, []).append(rank)
    first, *other_parties = parties.values()
    return f"{_ranks(first)} from {' and '.join(map(_names, other_parties))}"


def _ranks(ranks: Sequence[int]) -> str:
    verb = "differ" if len(ranks) > 1 else "differs"
    return f"{_names(ranks)} {verb}"


def _names(ranks: Sequence[int]) -> str:
    words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}"
    if len(ranks) > _SHOWN:
        words += ", …"
    return words
