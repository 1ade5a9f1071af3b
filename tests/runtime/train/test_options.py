"""Options that cannot be: each is told in the user's words, before anything starts."""

import re

import pytest

from helpers.bigram import PLAN
from scalec.runtime.errors import RunError
from scalec.runtime.train.options import parse


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--steps five", "--steps: `five` is not a whole number from 1 upwards"),
        ("--steps 0", "--steps: `0` is not a whole number from 1 upwards"),
        ("--keep-every -1", "--keep-every: `-1` is not a whole number from 0 upwards"),
        ("--step-limit soon", "--step-limit: `soon` is not a number of seconds above 0"),
        ("--save-limit 0", "--save-limit: `0` is not a number of seconds above 0"),
        ("--lr fast", "--lr: `fast` is not a number from 0 upwards"),
        ("--lr -1", "--lr: `-1` is not a number from 0 upwards"),
        ("--lr nan", "--lr: `nan` is not a number from 0 upwards"),
        ("--lr inf", "--lr: `inf` is not a number from 0 upwards"),
    ],
)
def test_a_number_that_cannot_be_is_told(options: str, said: str) -> None:
    with pytest.raises(RunError, match=re.escape(f"argument {said}; --help lists the options")):
        parse(PLAN, options.split())


def test_a_learning_rate_may_be_0() -> None:
    assert parse(PLAN, ["--lr", "0"]).lr == 0
