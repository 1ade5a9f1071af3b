"""Runs that go on under another plan: what changes of mesh keep the run, and what each refusal
says.

The first plan trains two steps and saves; the second goes on.  Both are compiled as `scalec
compile` compiles them.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import scalec
from helpers.oracle.plans import Case, plan_text
from scalec.runtime.checkpoint.reader import Saved
from scalec.testing.faults import Program, fork

Edits = Sequence[tuple[str, str]]
Planned = tuple[Case, Edits]

ROWS = 8
DENSE = Case(optimizer="adamw", precision="fp32")
PADDED = replace(DENSE, padded=True)
EXPERTS = replace(DENSE, model="two")


def _write(folder: Path, name: str, planned: Planned) -> Path:
    case, edits = planned
    text = plan_text(case).replace(f"global_batch = {case.rows}", f"global_batch = {ROWS}")
    text = text.replace("microbatch = 2", "microbatch = 1")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.scale"
    file.write_text(text)
    scalec.plan(file).write(folder / name)
    (folder / name / "corpus.bin").write_bytes(bytes(place * 7 % 23 for place in range(8000)))
    return folder / name


def _run(folder: Path, planned: Planned, options: str) -> str:
    """What the ranks say as an error; "" of a run that ends well."""
    program = Program(
        folder,
        planned[0].ranks,
        f"--data=corpus.bin --data-as-is --device=cpu --out=../run {options}",
    )
    with fork(program) as job:
        ended = job.wait(120)
    said = "".join(ended.err)
    assert ended.succeeded == (said == ""), said
    return said


def _resumed(tmp_path: Path, first: Planned, second: Planned, options: str = "--resume") -> str:
    assert _run(_write(tmp_path, "first", first), first, "--steps=2") == ""
    return _run(_write(tmp_path, "second", second), second, f"--steps=4 {options}")


CHANGES: dict[str, tuple[Planned, Planned]] = {
    "more padding": (
        (PADDED, [("29 pad 4", "27 pad 4")]),
        (replace(PADDED, tp=2), [("29 pad 4", "27 pad 32")]),
    ),
    "less padding": (
        (replace(PADDED, tp=2), [("29 pad 4", "27 pad 32")]),
        (PADDED, [("29 pad 4", "27 pad 4")]),
    ),
    "padding that was none": ((PADDED, [("29 pad 4", "29")]), (replace(PADDED, tp=2), ())),
    "no padding any more": ((replace(PADDED, tp=2), ()), (PADDED, [("29 pad 4", "29")])),
    "padding under zero 3, tied, and stages": (
        (replace(PADDED, dp=2, model="tied", state="zero 3 over dp"), ()),
        (replace(PADDED, pp=2, tp=2, model="tied"), [("29 pad 4", "29 pad 14")]),
    ),
    "within experts to experts": (
        (replace(EXPERTS, tp=2, inner=True), ()),
        (replace(EXPERTS, dp=2, experts="dp", state="zero 1 over dp"), ()),
    ),
    "experts to within experts": (
        (replace(EXPERTS, dp=2, experts="dp"), ()),
        (replace(EXPERTS, dp=2, tp=2, inner=True, state="zero 3 over dp"), ()),
    ),
    "a loss of all layers": (
        (replace(EXPERTS, model="all layers"), [("microbatch = 1", "microbatch = 2")]),
        (
            replace(EXPERTS, model="all layers", dp=2, experts="dp"),
            [("microbatch = 1", "microbatch = 2")],
        ),
    ),
    "tensors to stages": ((replace(DENSE, tp=2), ()), (replace(DENSE, pp=2), ())),
    "a ring": ((DENSE, ()), (replace(DENSE, cp=2, how="via ring"), ())),
    "fp16": ((DENSE, ()), (replace(DENSE, precision="fp16"), ())),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on(change: str, tmp_path: Path) -> None:
    assert _resumed(tmp_path, *CHANGES[change]) == ""


@pytest.mark.sample(1)
@pytest.mark.parametrize("change", [name for name in CHANGES if "padding" in name])
def test_the_same_run_goes_on_whatever_the_padding(change: str, tmp_path: Path) -> None:
    """Losses are those of the first plan's own next steps; rows that count are the same after
    its own save.
    """
    first, second = CHANGES[change]
    assert _resumed(tmp_path / "other", first, second) == ""
    assert _resumed(tmp_path / "same", first, first) == ""
    other, same = (_losses(tmp_path / name) for name in ("other", "same"))
    assert other == pytest.approx(same, rel=1e-5)
    ours, theirs = (
        Saved(tmp_path / name / "run" / "checkpoints" / "step-000004") for name in ("other", "same")
    )
    for key in [key for key in ours.tensors() if key.rpartition("/")[2] in ("wte", "head")]:
        a, b = (saved.whole([key])[key][:27] for saved in (ours, theirs))
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-5), key


def _losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "log.jsonl").read_text().splitlines()
    steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [step["loss"] for step in steps if "loss" in step]


ANOTHER = "is of another run\n"
REFUSALS: dict[str, tuple[Planned, Planned, str, str]] = {
    "wider masters": (
        (DENSE, ()),
        (replace(DENSE, precision="fp64"), ()),
        "--resume",
        r"is float32 \[.*\], but the plan's is float64 \[.*\]: masters have the type that `precision` says, .* --init",
    ),
    "another optimizer": (
        (DENSE, ()),
        (replace(DENSE, optimizer="sgd"), ()),
        "--resume",
        ANOTHER
        + r"  optimizer was adamw, now sgd: the state that was saved is another optimizer's",
    ),
    "another optimizer anyway": (
        (replace(DENSE, optimizer="sgd"), ()),
        (DENSE, ()),
        "--resume-anyway",
        r"lacks `optimizer/exp_avg\S*, .*: a run goes on with the model and the optimizer that it had",
    ),
    "more layers": (
        (DENSE, ()),
        (replace(DENSE, layers=4), ()),
        "--resume-anyway",
        r"lacks `layers.2.norm1`, .*: a run goes on with the model",
    ),
    "another vocabulary": (
        (PADDED, ()),
        (PADDED, [("29 pad 4", "30 pad 4")]),
        "--resume",
        ANOTHER + r"  model was \w+, now \w+: the weights were trained to compute something else",
    ),
    "another vocabulary anyway": (
        (PADDED, [("29 pad 4", "24 pad 5")]),
        (PADDED, ()),
        "--resume-anyway",
        r"`wte` is float32 \[25, 16\], but the plan's is float32 \[32, 16\]: a run goes on with the model",
    ),
    "a smaller vocabulary anyway": (
        (PADDED, ()),
        (PADDED, [("29 pad 4", "24 pad 5")]),
        "--resume-anyway",
        r"`wte` is float32 \[32, 16\], but the plan's is float32 \[25, 16\]: a run goes on with the model",
    ),
    "another seed": (
        (DENSE, ()),
        (DENSE, [("seed = 3", "seed = 4")]),
        "--resume",
        ANOTHER + r"  seed was 3, now 4: samples come in another order",
    ),
    "another batch": (
        (DENSE, ()),
        (DENSE, [("global_batch = 8", "global_batch = 4")]),
        "--resume",
        ANOTHER
        + r"  global_batch was 8, now 4: step 3 begins with sample 8, not 16: 8 are seen twice",
    ),
    "done": (
        (DENSE, ()),
        (DENSE, ()),
        "--resume --steps=2",
        r"step-000002 has finished its 2 steps already: ask for more with --steps 4",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_refusal_names_its_cause(refusal: str, tmp_path: Path) -> None:
    first, second, options, words = REFUSALS[refusal]
    said = _resumed(tmp_path, first, second, options)
    assert said.startswith("error: "), said
    assert re.search(words, said), said
    assert len(said.splitlines()) < 8


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    folder = _write(tmp_path, "first", (DENSE, ()))
    said = _run(folder, (DENSE, ()), "--steps=2 --resume")
    assert said == (
        "error: nothing to resume: no checkpoint in ../run/checkpoints; --resume auto begins"
        " where there is none\n"
    )
