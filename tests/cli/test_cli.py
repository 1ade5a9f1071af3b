"""The commands as a user meets them: what they print, and their exit status."""

import json
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from helpers.commands import CommandLine
from scalec.compiler import cli
from scalec.compiler.cli.arguments import WISHES
from scalec.compiler.cli.commands import COMMANDS, Entry
from scalec.compiler.syntax.limits import MAX_BYTES
from scalec.compiler.tuning import lowering
from scalec.compiler.tuning.lowering import PASS_NAMES

PLAN = """model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 8  hidden = 4 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh { dp = 2  tp = 2 }
shard {
  batch over dp
  vocab over tp
}
train {
  seq = 16  global_batch = 8  microbatch = 2  steps = 1
  optimizer sgd { lr = 0.1 }
  data text { files = ["a"] }
}
"""

MACHINES = "cluster { gpus_per_node = 2  nodes = 2 }\n"


@pytest.fixture(autouse=True)
def folder(working_folder: Path) -> Path:
    (working_folder / "tiny.scale").write_text(PLAN)
    return working_folder


# ---- check


def test_check(run_scalec: CommandLine) -> None:
    assert run_scalec("check", "tiny.scale") == (
        0,
        "ok  tiny: 64 parameters on 4 ranks, dp 2 x tp 2, 128 tokens a step\n",
        "",
    )


def test_one_rank(run_scalec: CommandLine) -> None:
    Path("tiny.scale").write_text(PLAN.replace("dp = 2  tp = 2", "dp = 1  tp = 1"))
    assert (
        run_scalec("check", "tiny.scale")[1]
        == "ok  tiny: 64 parameters on one rank, 128 tokens a step\n"
    )


def test_an_axis_that_was_factored(run_scalec: CommandLine) -> None:
    x = """x = attention(x @ wq[hidden -> heads, head_dim], x @ wk[hidden -> kv_heads, head_dim],
                x @ wv[hidden -> kv_heads, head_dim], mask=causal) @ wo[heads, head_dim -> hidden]
  loss"""
    plan = PLAN.replace("hidden = 4", "hidden = 8  heads = 4  kv_heads = 2  head_dim = 2").replace(
        "tp = 2", "tp = 4"
    )
    Path("tiny.scale").write_text(
        plan.replace("loss", x, 1).replace("vocab over", "vocab, heads, kv_heads over")
    )
    _, out, _ = run_scalec("compile", "tiny.scale")
    assert out.startswith("tiny: 320 parameters on 8 ranks, dp 2 x tp 4 (tp_0 2 x tp_1 2)\n")
    rows = [
        re.split("  +", line)[:3] for line in out.splitlines() if line.startswith("all_reduce ")
    ]
    assert rows == [
        ["all_reduce", "dp", "2"],
        ["all_reduce", "dp x tp_1", "4"],  # the gradients of wk and wv
        ["all_reduce", "tp", "4"],
        ["all_reduce", "tp_0", "2"],  # their squares
        ["all_reduce (max)", "tp", "4"],
    ]


def test_diagnostics_of_a_wrong_plan(run_scalec: CommandLine) -> None:
    Path("tiny.scale").write_text(PLAN.replace("batch over dp", "batsh over dp"))
    for command in ("check", "compile", "run", "ir"):
        status, out, err = run_scalec(command, "tiny.scale")
        assert (status, out) == (1, "")
        assert err.startswith("error[E0503]: there is no dim `batsh`")
        assert "--> tiny.scale:9" in err
        assert "\x1b" not in err
    assert not Path("out").exists()


def test_diagnostics_are_coloured_on_a_terminal(
    run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run_scalec("check", "missing.scale")[2].startswith("\x1b[1;31merror[E0101]")


# ---- compile


def test_compile(run_scalec: CommandLine) -> None:
    status, out, err = run_scalec("compile", "tiny.scale")
    assert (status, err) == (0, "")
    assert re.sub(r"error below 2\^-\d+", "error below 2^-…", out) == (
        "tiny: 64 parameters on 4 ranks, dp 2 x tp 2\n"
        "\n"
        "per rank and step  axis  ranks  calls    input\n"
        "all_reduce         dp        2      3    140 B\n"
        "all_reduce         tp        2      9  2.5 KiB\n"
        "all_reduce (max)   tp        2      2    256 B\n"
        "\n"
        "verified: the step is that of a single device: loss, 2 gradients and 2 updates equal"
        " on dp 2 × tp 3 and dp 3 × tp 2, error below 2^-…\n"
        "wrote out/tiny/hf_names.json, out/tiny/predictions.json, out/tiny/train.py and"
        " out/tiny/plan.json\n"
        "to train:\n"
        "\n"
        "  torchrun --standalone --nproc-per-node=4 out/tiny/train.py\n"
    )
    assert sorted(path.name for path in Path("out/tiny").iterdir()) == [
        "hf_names.json",
        "plan.json",
        "predictions.json",
        "train.py",
    ]


def test_a_second_compile_replaces_the_first(run_scalec: CommandLine) -> None:
    assert run_scalec("compile", "tiny.scale", "-o", "x")[0] == 0
    before = Path("x/train.py").read_text()
    Path("tiny.scale").write_text(PLAN.replace("hidden = 4", "hidden = 8"))
    assert run_scalec("compile", "tiny.scale", "-o", "x")[0] == 0
    assert Path("x/train.py").read_text() != before


def test_what_is_written_says_who_wrote_it(run_scalec: CommandLine) -> None:
    run_scalec("compile", "tiny.scale")
    assert (
        json.loads(Path("out/tiny/plan.json").read_text())["written_by"]
        == f"scalec {version('scalec')}"
    )


def test_a_path_with_a_space_is_quoted(run_scalec: CommandLine) -> None:
    assert (
        "torchrun --standalone --nproc-per-node=4 'my out/train.py'"
        in run_scalec("compile", "tiny.scale", "-o", "my out")[1]
    )


def test_several_machines(run_scalec: CommandLine) -> None:
    Path("tiny.scale").write_text(MACHINES + PLAN)
    _, out, _ = run_scalec("compile", "tiny.scale")
    line = (
        "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d"
        " --rdzv-endpoint=$HEAD:29500 out/tiny/train.py"
    )
    assert (
        "to train, run this on each of the 2 nodes ($HEAD is the address of one of them):\n\n"
        f"  {line}\n" in out
    )


def test_output_that_scalec_did_not_write_is_refused(run_scalec: CommandLine) -> None:
    Path("train.py").write_text("mine")
    status, out, err = run_scalec("compile", "tiny.scale", "-o", ".")
    assert (status, out) == (2, "")
    assert (
        err == "error: `train.py` was not written by scalec: move it away, or choose another folder"
        " with -o\n"
    )
    assert not Path("plan.json").exists()


# ---- run


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """What `run` becomes, in place of becoming it."""
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: commands.append(words))  # type: ignore[misc]
    return commands


def test_run(run_scalec: CommandLine, executed: list[Sequence[str]]) -> None:
    status, out, _ = run_scalec("run", "tiny.scale", "-o", "x", "--", "--steps", "3", "--", "y")
    assert status == 0
    torchrun = [
        sys.executable,
        "-m",
        "scalec.runtime.train.torchrun",
        "--standalone",
        "--nproc-per-node=4",
    ]
    assert executed == [[*torchrun, "x/train.py", "--resume", "auto", "--steps", "3", "--", "y"]]
    wrote = "wrote x/hf_names.json, x/predictions.json, x/train.py and x/plan.json\n"
    assert out.endswith(
        f"{wrote}starting 4 processes: Python and torch take some seconds to load\n"
    )


@pytest.mark.parametrize(
    ("words", "restarts", "arguments"),
    [
        ("", [], "--resume auto"),
        ("--max-restarts 3", ["--max-restarts=3"], "--resume auto"),
        ("--anew", [], ""),
        ("-- --resume-anyway", [], "--resume-anyway"),
        ("-- --export=x", [], "--export=x"),
    ],
)
def test_run_goes_on_with_a_compiled_program(
    words: str,
    restarts: list[str],
    arguments: str,
    run_scalec: CommandLine,
    executed: list[Sequence[str]],
) -> None:
    run_scalec("compile", "tiny.scale", "-o", "x")
    status, out, _ = run_scalec("run", "x/train.py", *words.split())
    assert (status, out) == (
        0,
        "starting 4 processes: Python and torch take some seconds to load\n",
    )
    torchrun = [
        sys.executable,
        "-m",
        "scalec.runtime.train.torchrun",
        "--standalone",
        "--nproc-per-node=4",
    ]
    assert executed == [[*torchrun, *restarts, "x/train.py", *arguments.split()]]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "tiny.scale --anew --max-restarts 2",
            "each restart would begin anew: --anew and --max-restarts do not go together",
        ),
        ("y/train.py", "there is no `y/train.py`: `scalec compile` writes it"),
        ("y.py", "`plan.json`, which `scalec compile` writes beside train.py, cannot be read"),
    ],
)
def test_run_that_cannot_be(
    words: str, error: str, run_scalec: CommandLine, executed: list[Sequence[str]]
) -> None:
    Path("y.py").touch()
    status, _, err = run_scalec("run", *words.split())
    assert (status, executed) == (2, [])
    assert err == f"error: {error}\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("source", ["tiny.scale", "x/train.py"])
def test_the_help_of_a_program_is_shown_once(
    source: str, executed: list[Sequence[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", "tiny.scale", "-o", "x"]) == 0
    capfd.readouterr()
    assert cli.main(["run", source, "--", "--help"]) == 0
    assert executed == []
    out = capfd.readouterr().out
    assert out.count("usage: train.py") == 1
    assert "verified" not in out
    assert "--log-to" in out


@pytest.mark.parametrize("words", ["--log-to wandb", "--steps 3 --log-to tensorboard wandb --lr 1"])
def test_a_package_that_a_run_needs_is_missed_before_it_compiles(
    words: str,
    run_scalec: CommandLine,
    executed: list[Sequence[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name != "wandb" else None)  # type: ignore[misc]
    status, out, err = run_scalec("run", "tiny.scale", "--", *words.split())
    assert (status, out, executed) == (2, "", [])
    assert err == "error: --log-to wandb needs the package wandb: pip install 'scalec[wandb]'\n"
    assert not Path("out").exists()


def test_run_on_several_machines(run_scalec: CommandLine, executed: list[Sequence[str]]) -> None:
    Path("tiny.scale").write_text(MACHINES + PLAN)
    status, _, err = run_scalec("run", "tiny.scale")
    assert (status, executed) == (2, [])
    job = "`scalec launch slurm tiny.scale` writes the job for Slurm (`k8s` for Kubernetes)"
    each = "`scalec compile` prints the torchrun command for each node"
    assert err == f"error: this plan runs on 2 nodes: {job}; {each}\n"


def test_run_without_torch(
    run_scalec: CommandLine, executed: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # type: ignore[misc]
    status, _, err = run_scalec("run", "tiny.scale")
    assert (status, executed) == (2, [])
    assert err.startswith("error: torch is not installed")


# ---- ir


@pytest.mark.parametrize("stage", PASS_NAMES)
def test_ir_after_each_pass_reads_back(run_scalec: CommandLine, stage: str) -> None:
    status, out, err = run_scalec("ir", "tiny.scale", "--after", stage)
    assert (status, err) == (0, "")
    assert f"\nprogram tiny after {stage}\n" in out
    Path("tiny.ir").write_text(out)
    assert run_scalec("ir", "tiny.ir", "--after", stage)[1] == out
    assert run_scalec("ir", "tiny.ir")[1] == run_scalec("ir", "tiny.scale")[1]


def test_ir_compiles_in_place_of_the_plan(run_scalec: CommandLine) -> None:
    Path("tiny.ir").write_text(run_scalec("ir", "tiny.scale", "--after", "propagate")[1])
    assert (
        run_scalec("compile", "tiny.ir", "-o", "x")[1]
        == run_scalec("compile", "tiny.scale", "-o", "x")[1]
    )


MANY_ROWS = {  # 16 ranks of 4 stages, 64 microbatches
    "hidden = 4 }": "hidden = 4  wide = 8  layers = 64 }",
    "  loss =": (
        "  repeat layers { x = x + x @ up[hidden -> wide] @ down[wide -> hidden] }\n  loss ="
    ),
    "dp = 2  tp = 2": "pp = 16",
    "  batch over dp\n  vocab over tp": "  layers over pp",
    "global_batch = 8  microbatch = 2": "global_batch = 64  microbatch = 1",
    "train {": "pipeline { schedule = interleaved_1f1b(chunks=4) }\ntrain {",
}


def test_ir_with_long_rows_takes_the_place_of_a_plan(run_scalec: CommandLine) -> None:
    text = PLAN
    for old, new in MANY_ROWS.items():
        assert old in text
        text = text.replace(old, new)
    Path("long.scale").write_text(text)
    Path("long.ir").write_text(run_scalec("ir", "long.scale")[1])
    assert Path("long.ir").stat().st_size > 3 * MAX_BYTES
    assert run_scalec("ir", "long.ir") == (0, Path("long.ir").read_text(), "")
    assert run_scalec("verify", "long.ir")[0] == 0
    assert run_scalec("schedule", "long.ir") == run_scalec("schedule", "long.scale")


def test_a_plan_is_no_longer_than_it_may_be(run_scalec: CommandLine) -> None:
    Path("long.scale").write_text(PLAN + "#" * MAX_BYTES)
    status, _, err = run_scalec("check", "long.scale")
    assert (status, err.splitlines()[0]) == (1, "error[E0102]: `long.scale` is larger than 64 KiB")


def test_ir_does_not_go_back(run_scalec: CommandLine) -> None:
    Path("tiny.ir").write_text(run_scalec("ir", "tiny.scale", "--after", "propagate")[1])
    status, out, err = run_scalec("ir", "tiny.ir", "--after", "validate")
    assert (status, out) == (2, "")
    assert err == "error: `tiny.ir` is IR from after `propagate`, which comes after `validate`\n"


def test_an_unknown_pass_lists_the_passes(run_scalec: CommandLine) -> None:
    status, _, err = run_scalec("ir", "tiny.scale", "--after", "magic")
    assert status == 2
    assert err.startswith("error: unknown pass `magic`; passes, in order: `resolve`, `validate`, ")


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("after propagate", "after magic", "there is no pass `magic`"),
        (
            "embedding(tokens, wte.1)",
            "embedding(tokens, nothing)",
            "nothing is used before it is bound",
        ),
    ],
)
def test_ir_edited_to_something_illegal(
    run_scalec: CommandLine, old: str, new: str, note: str
) -> None:
    text = run_scalec("ir", "tiny.scale", "--after", "propagate")[1]
    assert old in text
    Path("tiny.ir").write_text(text.replace(old, new))
    status, _, err = run_scalec("check", "tiny.ir")
    assert status == 1
    assert err.startswith("error[E0190]: this IR is not legal")
    assert note in err


# ---- the rest


def test_version(run_scalec: CommandLine) -> None:
    assert run_scalec("--version") == (0, f"scalec {version('scalec')}\n", "")


def test_help_and_version_are_words_too(run_scalec: CommandLine) -> None:
    assert run_scalec("version") == run_scalec("--version")
    assert run_scalec("help") == run_scalec("--help")
    assert run_scalec("help", "run") == run_scalec("run", "--help")


def test_the_commands_that_helps_name_exist() -> None:
    names = {command.name for command in COMMANDS}
    for words, help in WISHES.items():
        assert not names & {*words.split()}
        assert {*re.findall(r"`(?:scalec )([a-z]+)", help)} <= names


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_shows_an_example(run_scalec: CommandLine, command: Entry) -> None:
    status, out, _ = run_scalec(command.name, "--help")
    assert status == 0
    assert f"example:\n  scalec {command.name}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: COMMAND"),
        (["compile"], "required: PLAN"),
        (
            ["--quick", "check", "tiny.scale"],
            "scalec check: error: unrecognized arguments: --quick",
        ),
        (["compile", "tiny.scale", "-o", ""], "-o/--output: it is empty: name a file or a folder"),
        (["check", ""], "PLAN: it is empty"),
        (["log", "a" * 256], "RUN: it has a name of more than 255 bytes, which no file has"),
        (["schedule", "tiny.scale", "--svg", ""], "--svg: it is empty"),
        (["import", "config.json", "-o", ""], "-o/--output: it is empty"),
        (
            ["build", "tiny.scale"],
            "unknown command `build`: `scalec compile PLAN` writes the training program\n",
        ),
        (
            ["train", "tiny.scale"],
            "unknown command `train`: `scalec run PLAN` compiles a plan and trains it",
        ),
        (["generate"], "for text from a model export it"),
        (["wibble"], "invalid choice: 'wibble'"),
        (
            ["import", "org/model-7B"],
            "error: `org/model-7B` is not a file: `hf download org/model-7B config.json",
        ),
        (["chek", "tiny.scale"], "error: unknown command `chek`: did you mean `check`?\n"),
        (["check", "tiny.scale", "--out", "x"], "unrecognized arguments: --out x"),
        (["explain", "time", "tiny.scale", "--bogus"], "usage: scalec explain "),
        (
            ["compile", "tiny.scale", "--", "--steps"],
            "only `scalec run` and `scalec launch` take arguments after `--`",
        ),
        (
            ["run", "tiny.scale", "--steps", "3", "--", "--lr", "1e-3"],
            "error: `--steps` goes to train.py, after `--`: scalec run PLAN -- --steps …\n",
        ),
        (["run", "--steps", "3", "tiny.scale"], "error: `--steps` goes to train.py, after `--`"),
        (["run", "tiny.scale", "other.scale"], "error: unrecognized arguments: other.scale\n"),
    ],
)
def test_usage(run_scalec: CommandLine, words: list[str], said: str) -> None:
    status, out, err = run_scalec(*words)
    assert (status, out) == (2, "")
    assert said in err


def test_dump(run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCALEC_DUMP", "propagate")
    _, _, err = run_scalec("check", "tiny.scale")
    assert err.startswith("# after propagate\n")
    assert err.count("# after ") == 1
    monkeypatch.setenv("SCALEC_DUMP", "all")
    _, _, err = run_scalec("check", "tiny.scale")
    assert [
        line.removeprefix("# after ") for line in err.splitlines() if line.startswith("# after ")
    ] == [*PASS_NAMES]


@pytest.mark.parametrize(
    ("module", "attribute"),
    [("passes.flatten_sums", "uses"), ("tuning.decisions.choose_bucket", "fuse_buckets")],
)
def test_a_bug_names_the_pass(
    module: str, attribute: str, run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[f"scalec.compiler.{module}"], attribute, None)
    status, out, err = run_scalec("check", "tiny.scale")
    assert (status, out) == (70, "")
    assert err.startswith("Traceback")
    name = module.rpartition(".")[2]
    last = f"this is a bug in scalec, in pass `{name}`: TypeError"
    assert err.splitlines()[-1].startswith(last)


def test_a_bug_elsewhere_names_the_module(
    run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lowering, "resolve_plan", lambda source: 1 / 0)  # type: ignore[misc]
    status, _, err = run_scalec("check", "tiny.scale")
    assert status == 70
    last = "this is a bug in scalec, in module `cli.compile`: ZeroDivisionError: division by zero"
    assert err.splitlines()[-1] == last


def test_an_interruption_is_quiet(run_scalec: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lowering, "resolve_plan", interrupt)
    assert run_scalec("check", "tiny.scale") == (130, "", "")
