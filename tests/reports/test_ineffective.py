"""A setting changes the program, or a warning says that it has no effect: every setting, in
plans of many kinds.
"""

import re
from typing import Any

import pytest

from scalec.compiler.config.fields import fields_of
from scalec.compiler.config.settings import Data, DataSet, Flow, Optimizer, Schedule, Train, Watch
from scalec.compiler.emit import emit
from scalec.compiler.reports.lints import advice
from scalec.compiler.syntax.codes import get_example_plan
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

EXPERTS: str = get_example_plan().partition("cluster {")[0]
DENSE = re.sub(r"    m = rmsnorm\(x, norm2.*?x = x \+ m\n", "", EXPERTS, flags=re.DOTALL)
FLAT = re.sub(r"  repeat layers \{.*\n  \}\n", "", DENSE, flags=re.DOTALL)
TEXT = "data text { files = [python_stdlib] }"
TENSORS = "batch over dp  vocab, heads, kv_heads, ffn over tp"

PLANS: dict[str, dict[str, str]] = {
    "one rank": {},
    "without layers": {"model": FLAT},
    "dp": {"mesh": "dp = 2"},
    "tp": {"mesh": "dp = 2  tp = 2", "shard": TENSORS},
    "sp": {"mesh": "dp = 2  tp = 2", "shard": f"{TENSORS}  seq over tp"},
    "zero 3": {"mesh": "dp = 2", "state": "zero 3 over dp"},
    "pipeline": {"mesh": "pp = 2  dp = 2", "shard": "layers over pp  batch over dp"},
    "experts": {"model": EXPERTS, "mesh": "dp = 2"},
    "experts over ranks": {"model": EXPERTS, "mesh": "dp = 2", "shard": "batch, experts over dp"},
}

SETTINGS: dict[tuple[str, str], tuple[dict[str, str], dict[str, str]]] = {
    # the parts of a plan with the setting, and those of one without it, where that is not the plan
    # itself
    ("Train", "seed"): ({"train": "seed = 3"}, {}),
    ("Train", "precision"): ({"train": "precision = bf16"}, {}),
    ("Train", "master"): (
        {"train": "precision = fp16  master = bf16"},
        {"train": "precision = fp16"},
    ),
    ("Train", "reduce"): (
        {"train": "precision = bf16  reduce = bf16"},
        {"train": "precision = bf16"},
    ),
    ("Train", "kernels"): ({"train": "kernels = triton"}, {}),
    ("Train", "compile"): ({"train": "compile = on"}, {}),
    ("Train", "gathered"): ({"train": "gathered = regather"}, {}),
    ("Train", "recompute"): ({"train": "recompute = full"}, {}),
    ("Train", "room"): (
        {"train": "room = 2", "extra": "cluster { gpu = h100_sxm }"},
        {"extra": "cluster { gpu = h100_sxm }"},
    ),
    ("Train", "experts"): ({"train": "experts = padded"}, {}),
    ("Train", "save_every"): ({"train": "save_every = 7"}, {}),
    ("Train", "keep"): ({"train": "keep = 3"}, {}),
    ("Train", "keep_every"): ({"train": "keep_every = 15"}, {}),
    ("Flow", "bucket"): ({"state": "bucket = 2KiB"}, {}),
    ("Flow", "prefetch"): ({"state": "prefetch = 2"}, {}),
    ("Watch", "finite"): ({"extra": "watch { finite every 3 }"}, {}),
    ("Watch", "skips"): ({"extra": "watch { skips = 2 }"}, {}),
    ("Watch", "locate"): ({"extra": "watch { locate = on }"}, {}),
    ("Watch", "copies"): ({"extra": "watch { copies every 2 }"}, {}),
    ("Watch", "replay"): ({"extra": "watch { replay every 2 }"}, {}),
    ("Watch", "spikes"): ({"extra": "watch { spikes = 5 }"}, {}),
    ("Optimizer", "betas"): ({"optimizer": "betas = [0.8, 0.9]"}, {}),
    ("Optimizer", "eps"): ({"optimizer": "eps = 1e-6"}, {}),
    ("Optimizer", "weight_decay"): ({"optimizer": "weight_decay = 0.1"}, {}),
    ("Optimizer", "clip"): ({"optimizer": "clip = 1"}, {}),
    ("Optimizer", "group"): (
        {"optimizer": 'group norms { params = ["*norm*"]  lr_scale = 2 }'},
        {},
    ),
    ("Schedule", "warmup"): (
        {"optimizer": "schedule = cosine(warmup=3)"},
        {"optimizer": "schedule = cosine"},
    ),
    ("Schedule", "floor"): (
        {"optimizer": "schedule = cosine(floor=1e-4)"},
        {"optimizer": "schedule = cosine"},
    ),
    ("Data", "holdout"): ({"data": "data text { files = [python_stdlib]  holdout = 5% }"}, {}),
    ("Data", "as_is"): ({"data": "data text { files = [python_stdlib]  as_is = on }"}, {}),
    ("Data", "dtype"): (
        {"data": 'data tokens { files = ["a"]  dtype = uint32 }'},
        {"data": 'data tokens { files = ["a"] }'},
    ),
    ("DataSet", "weight"): (
        {
            "data": "data text { set a { files = [python_stdlib]  weight = 2 }  set b { files ="
            " [python_stdlib] } }"
        },
        {
            "data": "data text { set a { files = [python_stdlib] }  set b { files ="
            " [python_stdlib] } }"
        },
    ),
    ("DataSet", "holdout"): (
        {"data": "data text { set a { files = [python_stdlib]  holdout = 5% } }"},
        {"data": "data text { set a { files = [python_stdlib] } }"},
    ),
}

NOT_HERE = {
    "seq global_batch microbatch steps lr kind optimizer data files schedule set": (
        "every plan has them"
    ),
    "separator masked mask_token": "a plan whose model does not take them is refused",
    "momentum": "a setting of sgd alone",
    "tokenizer": "there is one",
    "logits": "it has no effect but with Triton kernels, and is refused without them",
}


def _plan(
    model: str = DENSE,
    mesh: str = "dp = 1",
    shard: str = "batch over dp",
    state: str = "",
    extra: str = "",
    train: str = "",
    optimizer: str = "",
    data: str = TEXT,
) -> Source:
    return Source(
        "plan.scale",
        f"""{model}
mesh {{ {mesh} }}
shard {{ {shard} }}
state {{ {state} }}
{extra}
train {{
  seq = 256  global_batch = 8  microbatch = 2  steps = 30  {train}
  optimizer adamw {{ lr = 1e-3  {optimizer} }}
  {data}
}}
""",
    )


def _compiled(plan: dict[str, str], change: dict[str, str]) -> tuple[str, str] | None:
    """The program without comments and hashes, and all warnings; None for a plan that is
    refused.
    """
    both = {**plan, **change}
    if "state" in plan and "state" in change:
        both["state"] = f"{plan['state']}  {change['state']}"
    source = _plan(**both)
    try:
        program = compile_plan(source)
        text = emit(program, source)["train.py"]
    except PlanError:
        return None
    text = re.sub(r"#.*|[0-9a-f]{12,}", "", text)
    return re.sub(r'^""".*?"""', "", text, flags=re.DOTALL), "\n".join(
        each.message for each in advice(program)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PLANS)
def test_a_setting_changes_the_program_or_is_said_to_have_no_effect(name: str) -> None:
    plain = dict[str, Any]()
    for (section, key), (change, without) in SETTINGS.items():
        base = repr(without)
        plain[base] = plain.get(base) or _compiled(PLANS[name], without)
        found = _compiled(PLANS[name], change)
        if found is None:
            continue
        assert plain[base] is not None
        has_effect = found[0] != plain[base][0]
        is_said = f"`{key}` has no effect" in found[1]
        where = f"{section}.{key} in {name}"
        # the memory account alone is another
        known = (section, key) in {("Train", "room")} and not is_said
        known = known or (section, key) in SAVED
        assert has_effect != is_said or known, (
            f"{where}: the program {'changes' if has_effect else 'stays as it is'}"
        )


SAVED = {("Train", "keep_every"), ("Train", "save_every"), ("Watch", "copies")}
"""Settings that are numbers in any program: whether they act is up to the run, as the tests
below say.
"""


def test_every_setting_of_a_run_is_tried_or_has_a_reason() -> None:
    excused = {name for names in NOT_HERE for name in names.split()}
    tried = {key for _, key in SETTINGS}
    sections = (Train, Flow, Watch, Optimizer, Schedule, Data, DataSet)
    settings = {field.key for section in sections for field in fields_of(section)} - {
        "name",
        "group",
    }
    assert settings - tried - excused == set()
    assert tried & excused == set()


WITHOUT: dict[str, tuple[str, dict[str, str]]] = {
    "keep_every, which no save is at": ("keep_every", {"train": "keep_every = 7"}),
    "keep_every, which some saves are at": ("", {"train": "keep_every = 7  save_every = 2"}),
    "keep_every, which the last save is at": ("", {"train": "keep_every = 15"}),
    "save_every, after the end": ("save_every", {"train": "save_every = 30"}),
    "save_every, before the end": ("", {"train": "save_every = 29"}),
    "copies on one rank": ("copies", {"extra": "watch { copies every 2 }"}),
    "copies on two ranks": ("", {"extra": "watch { copies every 2 }", "mesh": "dp = 2"}),
    "a group like the optimizer": (
        "group norms",
        {"optimizer": 'group norms { params = ["*norm*"] }'},
    ),
    "a group with the same decay": (
        "group norms",
        {
            "optimizer": (
                'weight_decay = 0.1  group norms { params = ["*norm*"]  weight_decay = 0.1 }'
            )
        },
    ),
    "a group with another decay": (
        "",
        {
            "optimizer": (
                'weight_decay = 0.1  group norms { params = ["*norm*"]  weight_decay = 0.0 }'
            )
        },
    ),
    "a holdout that each set has": (
        "holdout",
        {"data": "data text { holdout = 5%  set a { files = [python_stdlib]  holdout = 1% } }"},
    ),
    "a holdout that a set takes": (
        "",
        {"data": "data text { holdout = 5%  set a { files = [python_stdlib] } }"},
    ),
    "the weight of one set": (
        "weight",
        {"data": "data text { set a { files = [python_stdlib]  weight = 2 } }"},
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_settings_that_only_a_run_would_follow(name: str) -> None:
    key, change = WITHOUT[name]
    found = _compiled({}, change)
    assert found is not None
    assert re.findall(r"`([^`]*)` has no effect", found[1]) == ([key] if key else [])
