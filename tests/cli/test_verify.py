"""`scalec verify` as a user meets it, and what `compile` says of the proof."""

import json
import re
from pathlib import Path

import pytest

from helpers.commands import CommandLine

ROOT = Path(__file__).parents[2]

PLAN = f"""use "{ROOT.name}/plans/models/llama.scale" {{
  dims {{ vocab = 16  hidden = 8  heads = 4  kv_heads = 2  ffn = 12  layers = 2 }}
}}
mesh {{ dp = 2  tp = 2 }}
shard {{
  batch over dp
  vocab, heads, kv_heads, ffn over tp
}}
train {{
  seq = 16  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd {{ lr = 0.1  clip = 1.0 }}
  data text {{ files = ["a"] }}
}}
"""


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> Path:
    (working_folder / ROOT.name).symlink_to(ROOT)
    (working_folder / "tiny.scale").write_text(PLAN)
    return working_folder


def test_a_plan_is_equal(run_scalec: CommandLine) -> None:
    status, out, err = run_scalec("verify", "tiny.scale")
    assert (status, err) == (0, "")
    assert re.sub(r"\d+ trials, error below 2\^-\d+", "…", re.sub(r"\d+\.\d+ s", "… s", out)) == (
        "equal  llama: 1,256 parameters on 4 ranks, dp 2 x tp 2\n"
        "\n"
        "results   loss, gradient norm, count of labels, 12 gradients and 12 updated parameters\n"
        "against   the step on one device of the model before any placement\n"
        "meshes    dp 2 × tp 3 and dp 3 × tp 2, at small sizes\n"
        "field     integers modulo 2147483579, …\n"
        "ops       104 in the IR, of 21 kinds, each with a field meaning\n"
        "causality no loss depends on a later token\n"
        "time      … s\n"
    )


def test_one_of_a_thing_is_named_as_one(run_scalec: CommandLine) -> None:
    model = """model one(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  classes = 8 }
  init ~ normal(0.02)
  loss = cross_entropy(embedding(tokens, table[vocab, classes]), labels)
}
"""
    Path("one.scale").write_text(model + PLAN[PLAN.index("train {") :])
    out = run_scalec("verify", "one.scale")[1]
    assert "loss, gradient norm, count of labels, 1 gradient and 1 updated parameter\n" in out
    assert "1 gradient and 1 update equal on one rank" in run_scalec("compile", "one.scale")[1]


# ---- IR text edited by hand


def coercions(text: str) -> list[int]:
    """The lines that are coercions."""
    return [i for i, line in enumerate(text.splitlines()) if " = coerce(" in line]


@pytest.mark.long
def test_without_any_one_coercion_the_ir_is_refused(run_scalec: CommandLine) -> None:
    text = run_scalec("ir", "tiny.scale")[1]
    lines = text.splitlines()
    assert len(coercions(text)) > 30
    for at in coercions(text):
        Path("edited.ir").write_text("\n".join(lines[:at] + lines[at + 1 :]) + "\n")
        for command in ("verify", "compile"):
            status, out, err = run_scalec(command, "edited.ir")
            assert (status, out) == (1, ""), lines[at]
            assert err.startswith("error[E0190]")
    assert not Path("out").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", ["insert_collectives", "differentiate", "place_state"])
def test_without_any_one_coercion_earlier_ir_is_refused(
    run_scalec: CommandLine, stage: str
) -> None:
    text = run_scalec("ir", "tiny.scale", "--after", stage)[1]
    lines = text.splitlines()
    assert coercions(text)
    for at in coercions(text):
        Path("edited.ir").write_text("\n".join(lines[:at] + lines[at + 1 :]) + "\n")
        assert run_scalec("verify", "edited.ir")[0] == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("yield sum loss, sum ", "yield last loss, sum ", "E0190", "carries"),
        ("mul(_g, _y.4)", "mul(_g, _g)", "E0701", "wrong only after the forward"),
        (
            "mul(loss.2, inv_num_tokens)",
            "mul(inv_num_tokens, inv_num_tokens)",
            "E0701",
            "results of the step differ: loss",
        ),
        (
            "vjp(d_sum_exp.1, d_label_logit.1,",
            "vjp(d_label_logit.1, d_sum_exp.1,",
            "E0701",
            "gradient of head",
        ),
    ],
)
def test_ir_that_is_legal_and_wrong(
    run_scalec: CommandLine, old: str, new: str, code: str, said: str
) -> None:
    text = run_scalec("ir", "tiny.scale")[1]
    assert old in text
    Path("edited.ir").write_text(text.replace(old, new, 1))
    for command in ("verify", "compile"):
        status, _, err = run_scalec(command, "edited.ir")
        assert status == 1
        assert err.startswith(f"error[{code}]")
        assert said in err
    assert not Path("out").exists()


# ---- two plans


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "other",
    [
        PLAN.replace("dp = 2  tp = 2", "tp = 4"),
        PLAN.replace("dp = 2  tp = 2", "dp = 1"),
        PLAN.replace("microbatch = 2", "microbatch = 1"),
        PLAN.replace("ffn over tp\n", "ffn over tp  seq over tp\n"),
        PLAN.replace("seq = 16", "precision = bf16  gathered = regather  seq = 16"),
    ],
)
def test_two_plans_make_the_same_update(run_scalec: CommandLine, other: str) -> None:
    other = (
        other.replace("batch over dp\n  vocab, heads, kv_heads, ffn over tp", "")
        if "dp = 1" in other
        else other
    )
    Path("other.scale").write_text(
        other.replace("batch over dp", "") if "tp = 4" in other else other
    )
    status, out, err = run_scalec("verify", "tiny.scale", "other.scale")
    assert (status, err) == (0, "")
    assert out.startswith("equal  tiny.scale and other.scale make the same update\n\n")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps = 1", "steps = 2  seed = 3", "`steps` 1 and 2; `seed` 0 and 3"),
        ('["a"]', '["a", "b"]', '`files` ["a"] and ["a", "b"]'),
        ('data text { files = ["a"] }', 'data tokens { files = ["a"] }', "`data` text and tokens"),
        (
            "seq = 16",
            "seq = 16  precision = bf16  master = bf16",
            "`precision` fp32 and bf16; `master` unset and bf16",
        ),
        ("dp = 2  tp = 2", "tp = 2  dp = 2", "no setting of `train`, nor how parameters begin"),
    ],
)
def test_what_two_plans_of_one_update_differ_in(
    run_scalec: CommandLine, old: str, new: str, said: str
) -> None:
    Path("cosine.scale").write_text(PLAN.replace("clip = 1.0", "schedule = cosine(warmup=1)"))
    Path("other.scale").write_text(Path("cosine.scale").read_text().replace(old, new))
    status, out, err = run_scalec("verify", "cosine.scale", "other.scale")
    assert (status, err) == (0, "")
    assert " the number of steps, over which a cosine falls;" in out
    assert out.endswith(f"differing     {said}\n")


def test_two_plans_whose_parameters_begin_otherwise(run_scalec: CommandLine) -> None:
    model = (ROOT / "plans/models/llama.scale").read_text()
    Path("mine.scale").write_text(model.replace("init ~ normal(0.02)", "init ~ normal(0.5)"))
    Path("other.scale").write_text(
        PLAN.replace(f"{ROOT.name}/plans/models/llama.scale", "mine.scale")
    )
    assert (
        "`wte` begins normal(0.02) and normal(0.5);"
        in run_scalec("verify", "tiny.scale", "other.scale")[1]
    )


KINDS = [
    "",
    "state { zero 1 over dp }\n",
    "state { zero 2 over dp }\n",
    "state { zero 3 over dp }\n",
    "kernels = triton",
    "precision = fp16",
    "recompute = full",
    "mesh { pp = 2  dp = 2 }  shard { batch over dp  layers over pp }\n",
    "mesh { tp = 4 }  shard { vocab, heads, kv_heads, ffn over tp }\n",
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.strip() or "plain")
def test_a_plan_and_its_own_ir_make_the_same_update(run_scalec: CommandLine, kind: str) -> None:
    plan = (
        PLAN.replace("seq = 16", f"{kind}  seq = 16") if "=" in kind and "{" not in kind else PLAN
    )
    if kind.startswith("mesh"):
        plan = f"{PLAN[: PLAN.index('mesh')]}{kind}{PLAN[PLAN.index('train {') :]}"
    Path("kind.scale").write_text(plan if "{ zero" not in kind else plan + kind)
    Path("kind.ir").write_text(run_scalec("ir", "kind.scale")[1])
    for pair in (("kind.scale", "kind.ir"), ("kind.ir", "kind.scale"), ("tiny.scale", "kind.ir")):
        assert run_scalec("verify", *pair)[0] == 0
    Path("other.ir").write_text(Path("kind.ir").read_text().replace("  lr = 0.1", "  lr = 0.2"))
    assert (
        "the plans first differ at the update" in run_scalec("verify", "kind.scale", "other.ir")[2]
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ffn = 12", "ffn = 16", ["dim `ffn` is 12 in the first plan, 16 in the second"]),
        (
            "lr = 0.1",
            "lr = 0.2",
            ["the plans first differ at the update", "forward and loss are the same"],
        ),
        ("clip = 1.0", "", ["the plans first differ at the update"]),
        (
            "train {",
            "watch { skips = 1  spikes = skip(9) } train {",
            ["the plans skip different steps: no rule and `spikes = skip(9.0)`"],
        ),
        (
            "global_batch = 8",
            "global_batch = 16",
            ["the plans have different numbers of sequences per step"],
        ),
    ],
)
def test_two_plans_part(run_scalec: CommandLine, old: str, new: str, said: list[str]) -> None:
    Path("other.scale").write_text(PLAN.replace(old, new))
    status, out, err = run_scalec("verify", "tiny.scale", "other.scale")
    assert (status, out) == (1, "")
    assert err.startswith("error[E0702]")
    for words in said:
        assert words in err


def test_two_models_part_at_a_value(run_scalec: CommandLine) -> None:
    model = (ROOT / "plans" / "models" / "llama.scale").read_text()
    Path("mine.scale").write_text(
        model.replace("silu(m @ w_gate[hidden -> ffn])", "(m @ w_gate[hidden -> ffn])")
    )
    Path("other.scale").write_text(
        PLAN.replace(f"{ROOT.name}/plans/models/llama.scale", "mine.scale")
    )
    status, _, err = run_scalec("verify", "tiny.scale", "other.scale")
    assert status == 1
    assert err.startswith("error[E0702]: the plans first differ at `")
    assert "layers 0" in err
    assert "llama.scale:28" in err
    assert "mine.scale:28" in err


# ---- what is written


def test_the_certificate_says_what_was_shown(run_scalec: CommandLine) -> None:
    assert run_scalec("compile", "tiny.scale")[0] == 0
    values = json.loads(Path("out/tiny/plan.json").read_text())["certificate"]["values"]
    assert values["meshes"] == [{"dp": 2, "tp": 3}, {"dp": 3, "tp": 2}]
    assert int(values["error"].removeprefix("below 2^-")) >= 50
    said = (
        "the IR's step was evaluated equal to the single-device step of the model before any"
        " placement"
    )
    assert said in " ".join(Path("out/tiny/train.py").read_text().split())


def test_no_verify_says_so_in_both(run_scalec: CommandLine) -> None:
    status, out, _ = run_scalec("compile", "tiny.scale", "--no-verify")
    assert status == 0
    assert "\nnot verified: --no-verify\n" in out
    assert json.loads(Path("out/tiny/plan.json").read_text())["certificate"]["values"].startswith(
        "not evaluated"
    )
    text = Path("out/tiny/train.py").read_text()
    assert "compiled with\n--no-verify" in text or "with --no-verify" in text
    assert "evaluated equal" not in text


def test_recheck_of_stages(run_scalec: CommandLine) -> None:
    """Whose account is larger than a plan may be."""
    plan = Path(__file__).parents[2] / "plans/tiny_pipeline.scale"
    run_scalec("compile", str(plan), "-o", "out/stages")
    status, out, err = run_scalec("verify", "--recheck", "out/stages")
    assert (status, err) == (0, "")
    assert "the rows of 2 and 3 ranks of pp run action by action" in out
    assert out.endswith(
        "\nhf_names.json  as written\nmessage_groups.csv  as written\npredictions.json  as written\n"
        "schedule.csv  as written\n"
    )
    path = Path("out/stages/schedule.csv")
    path.write_text(path.read_text().replace("0F0,", "", 1))
    status, _, err = run_scalec("verify", "--recheck", "out/stages")
    assert status == 1
    assert "schedule.csv is not the plan's" in err


def test_recheck(run_scalec: CommandLine) -> None:
    run_scalec("compile", "tiny.scale")
    status, out, err = run_scalec("verify", "--recheck", "out/tiny")
    assert (status, err) == (0, "")
    assert out.startswith("equal  out/tiny: llama")
    assert out.endswith(
        "train.py  104 ops, each matched to the IR, and every line as written\nhf_names.json "
        " as written\npredictions.json  as written\n"
    )


def test_recheck_of_a_program_of_torch_alone(run_scalec: CommandLine) -> None:
    run_scalec("compile", "tiny.scale", "--target", "dtensor", "-o", "out/torch")
    status, out, err = run_scalec("verify", "--recheck", "out/torch")
    assert (status, err) == (0, "")
    assert out.endswith(
        "train.py  104 ops, each matched to the IR, and every line as written\ntorch_ops.py "
        " as written\n"
    )
    library = Path("out/torch/torch_ops.py")
    text = library.read_text()
    library.write_text(text.replace("src_data_rank=None", "src_data_rank=0"))
    status, _, err = run_scalec("verify", "--recheck", "out/torch")
    assert status == 1
    assert "torch_ops.py is not the plan's" in err
    assert "src_data_rank=None" in err
    library.write_text(text)
    path = Path("out/torch/train.py")
    path.write_text(
        path.read_text().replace("reduced_gradients(model)", "list(model.parameters())", 1)
    )
    status, _, err = run_scalec("verify", "--recheck", "out/torch")
    assert status == 1
    assert "train.py is not the plan's" in err


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("train.py", "x = all_reduce(x, self.tp)", "x = x", "train.py is not the plan's"),
        (
            "train.py",
            "silu(linear(m, self.w_gate))",
            "linear(m, self.w_gate)",
            "train.py is not the plan's",
        ),
        ("train.py", "Verified: the IR's step", "Seen: the IR's step", "Verified: the IR's step"),
        ("train.py", "# [b, s, h]  llama", "# [s, b, h]  llama", "# [b, s, h]  llama"),
        (
            "train.py",
            "train_step, eval_step)\n",
            "train_step, eval_step)\n# more\n",
            "the plan's is ``",
        ),
        ("hf_names.json", "lm_head.weight", "head.weight", "hf_names.json is not the plan's"),
        ("predictions.json", '"cpu"', '"cuda"', "predictions.json is not the plan's"),
        ("plan.json", '"trials": ', '"trials": 9', "it differs under certificate"),
        (
            "plan.json",
            '"written_by"',
            '"proved": "all of it", "written_by"',
            "it differs under proved",
        ),
        ("plan.json", '"op": "all_reduce"', '"op": "all_gather"', "it differs under collectives"),
    ],
)
def test_recheck_finds_what_was_changed(
    run_scalec: CommandLine, file: str, old: str, new: str, said: str
) -> None:
    run_scalec("compile", "tiny.scale")
    path = Path("out/tiny", file)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    status, _, err = run_scalec("verify", "--recheck", "out/tiny")
    assert status == 1
    assert err.startswith("error[E0703]")
    assert said in err


def test_recheck_holds_copied_modules_to_their_hashes(run_scalec: CommandLine) -> None:
    run_scalec("compile", f"{ROOT.name}/examples/05_user_op.scale", "-o", "out/op")
    status, out, err = run_scalec("verify", "--recheck", "out/op")
    assert (status, err) == (0, "")
    assert "and every line as written\n" in out
    assert out.endswith("my_ops.py  as copied\n")
    copy = Path("out/op/my_ops.py")
    copy.write_text(copy.read_text().replace("1 - gate", "2 - gate"))
    status, _, err = run_scalec("verify", "--recheck", "out/op")
    assert status == 1
    assert err.startswith("error[E0703]: my_ops.py is not the plan's")
    copy.unlink()
    assert run_scalec("verify", "--recheck", "out/op")[0] == 1


def test_recheck_of_what_was_not_verified(run_scalec: CommandLine) -> None:
    run_scalec("compile", "tiny.scale", "--no-verify")
    status, out, err = run_scalec("verify", "--recheck", "out/tiny")
    assert (status, err) == (0, "")
    assert out.endswith(
        "it was compiled with --no-verify, and says so; the step was evaluated now\n"
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"plan": 1, "model": []}', '{"plan": "a.scale", "model": 5}']
)
def test_recheck_of_what_is_no_account(run_scalec: CommandLine, text: str) -> None:
    run_scalec("compile", "tiny.scale")
    Path("out/tiny/plan.json").write_text(text)
    status, out, err = run_scalec("verify", "--recheck", "out/tiny")
    assert (status, out) == (2, "")
    assert (
        err
        == "error: `out/tiny/plan.json` was not written by this scalec: compile the plan again\n"
    )


# ---- usage


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b", "c"], "verify takes one plan, or two to compare"),
        (["--audit", "--recheck", "a"], "--audit and --recheck exclude each other: choose one"),
        (["--audit", "a", "b"], "verify takes one plan"),
    ],
)
def test_usage(run_scalec: CommandLine, words: list[str], said: str) -> None:
    status, out, err = run_scalec("verify", *words)
    assert (status, out) == (2, "")
    assert said in err
