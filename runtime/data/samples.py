"""The model's inputs from sequences of tokens: tokens, labels and document numbers.

All of it is a function of the window, and masks also of seed and sample: the same on any mesh and
after a restart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.counter_rng import key_of, uniform

IGNORED = -100
"""A label that counts nothing."""

# of the tokens to predict: those masked, and with them those drawn at random
_REPLACED, _DRAWN = 0.8, 0.9


@dataclass(frozen=True)
class Marks:
    """The marks of a folder of `scalec data`, one a token: bool, [width] or [rows, width].

    counted  whether the loss counts the token's prediction
    begins   whether a document begins with it
    """

    counted: Tensor
    begins: Tensor

    @classmethod
    def stack(cls, marks: Sequence["Marks"]) -> "Marks":
        """The marks of several windows, a row each."""
        return cls(
            torch.stack([row.counted for row in marks]), torch.stack([row.begins for row in marks])
        )

    def with_tokens(self, windows: Tensor) -> Tensor:
        """Tokens and marks as one number each, int64: what is compared between ranks."""
        return windows + (self.counted.long() << 33) + (self.begins.long() << 34)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How windows of a corpus become samples.

    `as_is`: its files are read though they seem to be of another format than text or raw token
    ids.  A token `separator` ends each document.  Without `masked` each token's label is the token
    that follows.  With it, this share of tokens is predicted in place, most of them hidden by the
    token `mask_token`.
    """

    separator: int | None = None
    masked: float | None = None
    mask_token: int | None = None
    as_is: bool = False

    def width(self, seq: int) -> int:
        """Tokens of a window for sequences of `seq`: one more where the last one's label is the
        next.
        """
        if self.masked is None:
            return seq + 1
        return seq

    def make_inputs(
        self,
        windows: Tensor,
        samples: list[int],
        vocab: int,
        seed: int,
        marks: Marks | None = None,
    ) -> dict[str, Tensor]:
        """The model's inputs by name, int64, [rows, seq], from windows [rows, width], whose
        numbers are `samples`; files of text and of bare ids have no `marks`.
        """
        assert marks is None, "samples: marks that nothing reads"
        if self.masked is None:
            tokens, labels = windows[:, :-1], windows[:, 1:]
            # A separator predicts nothing: the token after it begins another document.
            labels = labels.masked_fill(self._ends(tokens), IGNORED)
        else:
            token_rows, label_rows = list[Tensor](), list[Tensor]()
            for row, sample in zip(windows, samples, strict=True):
                row_tokens, row_labels = self._hide(row, sample, vocab, seed)
                token_rows.append(row_tokens)
                label_rows.append(row_labels)
            tokens, labels = torch.stack(token_rows), torch.stack(label_rows)
        return {
            "tokens": tokens,
            "labels": labels,
            "documents": self._documents(windows[:, : tokens.shape[1]]),
        }

    def _ends(self, tokens: Tensor) -> Tensor:
        """Which tokens are separators."""
        if self.separator is None:
            return torch.zeros_like(tokens, dtype=torch.bool)
        return tokens == self.separator

    def _documents(self, tokens: Tensor) -> Tensor:
        """How many documents of the window have ended before each token; a separator belongs to
        the document that it ends.
        """
        ends = self._ends(tokens).long()
        return ends.cumsum(-1) - ends

    def _hide(self, tokens: Tensor, sample: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
        """Tokens with some hidden, and the tokens to predict as labels: of these 80% are masked,
        10% random, 10% unchanged.

        (Devlin et al. 2019, appendix A.1; each token by itself, and anew in each pass over the
        data, as in RoBERTa, Liu et al. 2019.)  Separators are neither hidden nor predicted.
        """
        assert self.masked is not None, "samples: nothing is to be masked"
        assert self.mask_token is not None, "samples: masks without a token"
        counter = 3 * torch.arange(len(tokens))
        chosen, fate, drawn = (
            uniform(key_of(f"{seed}/masks/{sample}"), counter + i) for i in range(3)
        )
        predicted = (chosen < self.masked) & ~self._ends(tokens)
        other = torch.where(fate < _DRAWN, (drawn * vocab).long(), tokens)
        other = other.masked_fill(fate < _REPLACED, self.mask_token)
        return torch.where(predicted, other, tokens), tokens.masked_fill(~predicted, IGNORED)
