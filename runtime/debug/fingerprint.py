"""Hashes of tensors: equal for equal bits; different bits collide with probability 2^-63.

A tensor's bits are read as words w of at most 32 bits, in blocks of 2^18.  The hash of a block is Σ k_i·w_i mod 2^64
with odd random keys k_i of 64 bits, once each with two sets of keys; the hash of the tensor is that of its blocks'
hashes, with keys of their own.  One word that differs is always seen, since no k_i·(w_i − v_i) is 0 mod 2^64.  Several
are missed with probability at most 2^-32 a set: for all but one of the keys given, the last has 2^63 values, and the
difference it multiplies, below 2^32, lets at most 2^31 of them give 0.  (Multilinear hashing: Carter and Wegman, 1979;
Lemire and Kaser, Computer Journal 57, 2014.)  So 2^-64 for the blocks and again for their hashes.

Sums of integers mod 2^64 do not depend on their order: the hash is the same on CPUs and GPUs, in any launch.

Non-goals: no defence against values that are made to collide.
"""

import zlib
from typing import Any, cast

import torch
from torch import Tensor

BLOCK = 1 << 18  # words, of each of which two products of 8 bytes stand at the same time
_WORDS = {1: torch.uint8, 2: torch.int16}  # by the bytes of an element; larger ones are several words


class Fingerprints:
    """Hashes of tensors on one device."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)  # the same keys on every rank
        keys = torch.randint(-(1 << 63), (1 << 63) - 1, (2, 2, BLOCK), generator=generator)
        self._blocks, self._whole = (keys | 1).to(device)

    def of(self, x: Tensor) -> Tensor:
        """[3] int64: two hashes of the bits, and one of element type and shape."""
        blocks = self.of_blocks(x).view(-1)
        layout = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode())
        return torch.cat((_hash(words(blocks), self._whole), blocks.new_tensor([layout])))

    def of_blocks(self, x: Tensor) -> Tensor:
        """[blocks, 2] int64: two hashes of the bits of each block of `words(x)`."""
        hashes = [_hash(part, self._blocks) for part in blocks(words(x))]
        return torch.stack(hashes) if hashes else self._blocks.new_zeros(1, 2)


def words(x: Tensor) -> Tensor:
    """The bits of x as integers of at most 32 bits, in order; a view if x is contiguous."""
    return x.detach().contiguous().view(-1).view(_WORDS.get(x.element_size(), torch.int32))


def blocks(words: Tensor) -> tuple[Tensor, ...]:
    """What is hashed together."""
    return cast(Any, words).split(BLOCK) if len(words) else ()


def _hash(words: Tensor, keys: Tensor) -> Tensor:
    """[2] int64: the sums of words times keys, one for each set of keys."""
    assert len(words) <= keys.shape[1], "fingerprint: more blocks than keys"
    return (keys[:, : len(words)] * words).sum(1)
