"""Rows of published measurements: what is read, predicted and written of a file of each kind."""

import csv
import importlib
import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest

from scalec.compiler.analysis.hardware import load
from scalec.compiler.analysis.hardware.files import FOLDER

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

Predict = Callable[..., Mapping[str, Mapping[str, Any]]]

PIPELINE = (
    "id,layers,hidden,heads,seq,gpu,pp,schedule,micro_batch,microbatches,samples_s_gpu,bubble_rate,\
T_F_ms,T_B_ms,T_W_ms,T_comm_ms"
)


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of frameworks' profiles."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("predicting.frameworks")


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Predicts the rows of a file's text."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def predicted(text: str, *options: str) -> Mapping[str, Mapping[str, Any]]:
        (tmp_path / "rows.csv").write_text(text)
        (tmp_path / "clusters.csv").write_text("cluster,node_gbit_s\nhere,3200\n")
        out = tmp_path / "out.json"
        monkeypatch.setattr(
            "sys.argv", ["predict.py", str(tmp_path / "rows.csv"), "--json", str(out), *options]
        )
        runpy.run_path(str(BENCHMARKS / "predict.py"), run_name="predict")["main"]()
        return json.loads(out.read_text())["rows"]

    return predicted


def test_pipelines_of_profiled_stages_have_the_bubble_of_their_schedule(predict: Predict) -> None:
    """1F1B of stages without messages waits p - 1 of m + p - 1 times, H1 for what W does not
    fill, ZB-2p nothing.
    """
    each = "6,512,8,1024,A100-80GB,4,{},1,16,,,2,2,2,0"
    names = {"1F1B": 3 / 19, "ZB-H1": 1 / 17, "ZB-1p": 1 / 17, "ZB-2p": 0.0}
    rows = [f"{name},{each.format(name)}" for name in names]
    found = predict("\n".join((PIPELINE, *rows, "formula,,,,,,,1F1B,,,,,,,,")))
    assert {name: found[name]["bubble_rate"] for name in names} == pytest.approx(names)
    assert found["formula"] == {
        "samples_s_gpu": None,
        "bubble_rate": None,
        "why": "a formula, without sizes",
    }


def test_stages_that_nobody_profiled_are_priced_or_taken_from_a_row_of_the_same_model(
    predict: Predict,
) -> None:
    """A stage of twice the layers takes twice as long, and so do twice the samples."""
    row = "{},6,512,8,1024,A100-80GB,{},1F1B,{},8,,,{}"
    given, alike = row.format("given", 4, 1, "2,2,2,0"), row.format("alike", 2, 2, ",,,")
    found = predict("\n".join((PIPELINE, given, alike)))
    busy = 8 * 6 * 2 * 2  # microbatches, milliseconds, layers, samples
    assert found["alike"]["bubble_rate"] == pytest.approx(1 / 9)
    assert found["alike"]["samples_s_gpu"] == pytest.approx(16 / (busy * 9 / 8 / 1e3) / 2, rel=0.2)
    priced = predict("\n".join((PIPELINE, row.format("alone", 4, 1, ",,,"))))["alone"]
    assert isinstance(priced["bubble_rate"], float)
    assert 3 / 11 < priced["bubble_rate"] < 0.5


TRAIN = "id,source,framework,cluster,gpu,gpus_per_node,layers,hidden,ffn,heads,kv_heads,head_dim,vocab,gated,tied,seq,\
dp,tp,sp,cp,pp,vpp,zero,micro_batch,microbatches,global_batch,recompute,compute,status,step_s,mem_reserved_gib"


def test_reserved_memory_is_that_of_the_state_and_of_microbatches_in_flight(
    predict: Predict,
) -> None:
    """18 bytes a parameter, of which ZeRO 1 divides 12; the first stage of four holds four
    microbatches.
    """

    def row(name: str, dp: int, pp: int, zero: int, batch: int) -> str:
        sizes = "8,4096,8192,32,32,128,512,yes,no,512"
        parts = f"{dp},1,no,1,{pp},1,{zero},{batch},8,{8 * dp * batch},none,bf16,ok,,"
        return f"{name},x,other,,h100_sxm,8,{sizes},{parts}"

    rows = [
        row("whole", 1, 1, 0, 1),
        row("zero", 4, 1, 1, 1),
        row("staged", 1, 4, 0, 1),
        row("large", 1, 1, 0, 64),
    ]
    found = predict("\n".join((TRAIN, *rows)))
    layer, outer = 4 * 4096**2 + 3 * 4096 * 8192 + 2 * 4096, 2 * 512 * 4096 + 4096
    sizes = {name: it["memory_gib"] for name, it in found.items()}
    whole, zero, staged = (float(sizes[name] or 0) * 2**30 for name in ("whole", "zero", "staged"))
    assert whole - zero == pytest.approx(12 * (8 * layer + outer) * 3 / 4)
    # and what the loss keeps
    assert whole - staged == pytest.approx(18 * (6 * layer + outer / 2), rel=0.05)
    assert (found["whole"]["fits"], found["large"]["fits"]) == (True, True)
    assert predict("\n".join((TRAIN, row("huge", 1, 1, 0, 512))))["huge"]["fits"] is False


def test_a_row_may_fit_where_only_a_part_of_its_range_does(predict: Predict) -> None:
    """Saved activations are 10% off at most, state is known; of 80 GiB the driver, CUDA and
    cuBLAS have theirs.
    """

    def row(
        batch: int, recompute: str = "none", assumed: str = "", framework: str = "other"
    ) -> str:
        sizes = "8,4096,8192,32,32,128,512,yes,no,512"
        parts = f"1,1,no,1,1,1,0,{batch},1,{batch},{recompute},bf16,ok,,"
        return f"{batch}{recompute}{assumed},x,{framework},,h100_sxm,8,{sizes},{parts},{assumed}"

    batches = range(16, 400, 16)
    text = "\n".join(
        (f"{TRAIN},assumed", *map(row, batches), row(64, assumed="recompute"), row(64, "full"))
    )
    found = predict(text)
    layer, outer = 4 * 4096**2 + 3 * 4096 * 8192 + 2 * 4096, 2 * 512 * 4096 + 4096
    state, room = 18 * (8 * layer + outer) / 2**30, 80 - 80 / 64 - 0.5 - 4 * 32 / 1024
    verdicts = list[bool | None]()
    for batch in batches:
        of = found[f"{batch}none"]
        low, high = of["memory_range_gib"]
        saved = of["memory_gib"] - state
        assert (low, high) == pytest.approx((state + 0.9 * saved, state + 1.1 * saved))
        assert of["room_gib"] == pytest.approx(room)
        verdicts.append(of["fits"])
        assert of["fits"] is (True if high <= room else None if low <= room else False)
    assert {*verdicts} == {True, None, False}
    unsaid, full, said = (found[name] for name in ("64nonerecompute", "64full", "64none"))
    assert unsaid["memory_range_gib"] == pytest.approx(
        (full["memory_range_gib"][0], said["memory_range_gib"][1])
    )
    assert unsaid["memory_gib"] == said["memory_gib"]


def test_gathered_inputs_stay_reserved_or_not(predict: Predict) -> None:
    """Of each layer that is the input of q, k and v, and that of the MLP; in bf16, whole on
    each rank of tp.
    """
    sizes, parts = "8,4096,8192,32,32,128,512,yes,no,512", "1,2,yes,1,1,1,0,4,1,4,none,bf16,ok,,"
    rows = [f"{name},x,{name},,h100_sxm,8,{sizes},{parts}" for name in ("nanotron", "other")]
    found = predict("\n".join((TRAIN, *rows)))
    low, high = found["nanotron"]["memory_range_gib"]
    likely, gathered = found["nanotron"]["memory_gib"], 8 * 2 * (4 * 512 * 4096 * 2) / 2**30
    own = (high - low - 1.08 * gathered) / (1.08 - 0.93)  # activations without gathered inputs
    assert likely - low == pytest.approx(0.07 * own + gathered)
    assert high - likely == pytest.approx(0.08 * (own + gathered))
    low, high = found["other"]["memory_range_gib"]
    assert high - found["other"]["memory_gib"] > gathered


def test_rows_that_may_fit_are_ranked_by_time_and_those_that_do_not_come_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest of five may fit; by one number it comes last, by its range first."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    choices = importlib.import_module("predicting.choices")
    rows = [
        {
            "id": f"{at}",
            "framework": "x",
            "cell": "one",
            "cell26": "",
            "status": "ok",
            "step_s": f"{1 + at}",
        }
        for at in range(5)
    ]
    found = {
        row["id"]: {
            "step_s": float(row["step_s"]),
            "memory_gib": 60.0,
            "memory_range_gib": (58, 62),
            "room_gib": 77,
        }
        for row in rows
    }
    found["0"] |= {"memory_gib": 78.0, "memory_range_gib": (70, 84)}
    cells = {
        name: [*choices._line(rows, found, rule, 0)][:3] for name, rule in choices.RULES.items()
    }
    assert cells["time alone"] == cells["range"] == ["1", "100.0%", "0.0%"]
    assert cells["one number"] == ["1", "0.0%", "100.0%"]
    # then all of its range is too much
    assert [*choices._line(rows, found, choices.verdict_by_range, 8)][1] == "0.0%"


MEMORY = (
    "id,layers,hidden,ffn,heads,vocab_arg,seq,gpu,dp,distributed_optimizer,tp,sp,cp,pp,vpp,experts,micro_batch,\
recompute,dtype,other_args"
)


def test_allocated_memory_is_that_of_the_last_rank_with_its_layers_scores_and_logits(
    predict: Predict,
) -> None:
    """What differs between two tests is what one has of layers, state or scores that the other
    lacks.
    """

    def row(name: str, optimizer: str, pp: int, more: str, experts: str = "") -> str:
        return (
            f"{name},8,256,,4,,512,H100"
            f" (DGX),4,{optimizer},1,no,1,{pp},,{experts},2,none,bf16,{more}"
        )

    rows = [
        row("plain", "no", 1, ""),
        row("sharded", "yes", 1, ""),
        row("unfused", "no", 1, "attention-backend=unfused"),
        row("staged", "no", 4, ""),
        row("experts", "no", 1, "", "8"),
    ]
    found = predict("\n".join((MEMORY, *rows)))
    static, peak = (
        {name: float(it[key] or 0) * 2**30 for name, it in found.items()}
        for key in ("static_gib", "peak_gib")
    )
    layer, table = 12 * 256**2 + 13 * 256, (50304 + 512) * 256 + 2 * 256
    assert static["plain"] - static["sharded"] == pytest.approx(12 * 3 / 4 * (8 * layer + table))
    message = 2 * 2 * 512 * 256
    assert static["plain"] - static["staged"] == pytest.approx(
        18 * (6 * layer + 512 * 256) - 3 * message
    )
    assert peak["unfused"] - peak["plain"] == pytest.approx(8 * 5 * 2 * 4 * 512**2)
    assert found["experts"] == {"static_gib": None, "peak_gib": None, "why": "experts"}


ALL = TRAIN + ",gpus,stack,attention,grad,compile,overlap,allreduce_gbs,cell"

PLAIN = {
    "source": ("x"), "framework": ("torchtitan"), "cluster": ("here"), "gpu": ("h100_sxm"), "gpus_per_node": ("8"), "layers": ("4"),
    "hidden": ("1024"), "ffn": ("4096"), "heads": ("8"), "kv_heads": ("8"), "head_dim": ("128"), "vocab": ("8192"), "gated": ("yes"),
    "tied": ("no"), "seq": ("1024"), "dp": ("1"), "tp": ("1"), "sp": ("no"), "cp": ("1"), "pp": ("1"), "vpp": ("1"), "zero": ("0"),
    "micro_batch": ("2"), "microbatches": ("8"), "global_batch": ("16"), "recompute": ("none"), "compute": ("bf16"),
    "status": "ok", "gpus": "1", "attention": "flash2", "grad": "fp32", "compile": "no",
}  # fmt: skip


def text(**rows: Mapping[str, str]) -> str:
    """A file of rows by their names, which say how they differ from the plain one."""
    lines = (
        ",".join({"id": name, **PLAIN, **more}.get(column, "") for column in ALL.split(","))
        for name, more in rows.items()
    )
    return "\n".join((ALL, *lines))


KINDS = {
    "plain": {},
    "mxfp8": {"compute": "mxfp8"},
    "unknown": {"framework": "another"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "scores": {
        "recompute": "selective",
        "attention": "unfused",
        "compute": "fp16",
        "tied": "yes",
        "gated": "no",
    },
    "compiled": {"compile": "yes"},
    "tp": {"tp": "4", "sp": "yes", "gpus": "4"},
    "async": {"tp": "4", "sp": "yes", "gpus": "4", "overlap": "async fsdp"},
    "cp": {"cp": "2", "gpus": "2"},
    "zero": {"dp": "16", "zero": "3", "gpus": "16", "global_batch": "256"},
    "slow": {"dp": "16", "tp": "8", "gpus": "128", "global_batch": "256", "allreduce_gbs": "20"},
    "fast": {"dp": "16", "tp": "8", "gpus": "128", "global_batch": "256", "allreduce_gbs": "300"},
    "staged": {"pp": "4", "gpus": "4"},
    "interleaved": {"pp": "2", "vpp": "2", "gpus": "2"},
    "domain": {
        "gpu": "gb200",
        "gpus_per_node": "72",
        "compute": "nvfp4",
        "attention": "flash_cudnn",
    },
}

NOT_SAID = {
    "type": ({"compute": "fp4"}, "products in fp4"),
    "empty": ({"vocab": ""}, "it lacks vocab"),
    "gpu": ({"gpu": "abacus"}, "no data sheet of abacus"),
    "stages": ({"pp": "8", "gpus": "8"}, "4 iterations cannot fill 8 stages"),
}


def test_training_steps_have_seconds_of_which_parts_are_the_sum_or_a_reason(
    predict: Predict,
) -> None:
    found: Any = predict(text(**KINDS, **{name: row for name, (row, _) in NOT_SAID.items()}))
    for name, (_, told) in NOT_SAID.items():
        figures = ("step_s", "memory_gib", "memory_range_gib", "room_gib", "fits", "parts")
        assert found[name] == {**dict.fromkeys(figures), "why": told}
    assert {*found["plain"]["parts"]} == {"compute", "tp", "dp", "bubble", "host", "update", "step"}
    for name in KINDS:
        assert sum(found[name]["parts"].values()) == pytest.approx(found[name]["step_s"])
        assert min(found[name]["parts"].values()) >= 0
    parts = {name: found[name]["parts"] for name in KINDS}
    seconds = {name: found[name]["step_s"] for name in KINDS}
    assert [name for name in KINDS if parts[name]["tp"]] == ["tp", "async", "cp", "slow", "fast"]
    assert [name for name in KINDS if parts[name]["bubble"]] == ["staged", "interleaved"]
    assert [name for name in KINDS if parts[name]["dp"]] == ["cp", "zero", "slow", "fast"]
    assert parts["async"]["tp"] < parts["tp"]["tp"]
    assert seconds["mxfp8"] < seconds["plain"] < seconds["full"]
    assert seconds["compiled"] < seconds["plain"]
    assert seconds["fast"] < seconds["slow"]


def test_latency_between_nodes_is_waited_for_and_that_of_a_congested_network_is_the_hosts(
    predict: Predict,
) -> None:
    """The same tensor parallelism over two nodes: only what the host waits for goes on beside
    the GPU's work.
    """
    two = {"tp": "16", "sp": "yes", "gpus": "16", "heads": "16", "kv_heads": "16", "head_dim": "64"}
    rows = text(fast=two, slow={**two, "allreduce_gbs": "20"}, one={**two, "gpus_per_node": "16"})
    found: Any = predict(rows)
    hops = 4 * 8 * 8 * 15 * 52e-6  # layers, microbatches, halves of all-reduces, hops of a ring
    assert found["fast"]["parts"]["tp"] - found["one"]["parts"]["tp"] >= 0.99 * hops
    assert found["slow"]["parts"]["tp"] < 0.5 * hops
    assert found["slow"]["parts"]["host"] > 4 * hops


def test_sharded_parameters_are_gathered_around_rings_of_all_ranks(predict: Predict) -> None:
    """Of 1,024 ranks on 128 nodes, too many for small layers to hide: two gathers and a scatter
    a layer.
    """
    rows = text(many={"dp": "1024", "zero": "3", "gpus": "1024", "global_batch": "16384"})
    parts: Any = predict(rows)["many"]["parts"]
    ring = (1024 - 128) * 5e-6 + 127 * 17e-6
    layers, microbatches = 4, 8
    sent = 3 * layers * microbatches * ring
    assert sent < parts["dp"] + parts["compute"] < 1.3 * sent
    assert parts["dp"] > 0.7 * sent


def test_ranks_of_a_sequence_reduce_gradients_and_share_state_too(predict: Predict) -> None:
    """Both are over dp and cp: 8 ranks of cp alone wait for sums, and update an eighth."""
    job = {
        "gpus": "8",
        "hidden": "4096",
        "heads": "32",
        "ffn": "16384",
        "global_batch": "16",
        "zero": "1",
    }
    found: Any = predict(text(one={**job, "gpus": "1"}, cp={**job, "cp": "8"}))
    assert found["cp"]["parts"]["dp"] > 0
    assert found["one"]["parts"]["dp"] == 0
    copied, own = 6, 31  # bytes of a parameter that is cast, and of one that is updated
    part = (copied + own / 8) / (copied + own)
    assert found["cp"]["parts"]["update"] == pytest.approx(
        part * found["one"]["parts"]["update"], rel=0.03
    )


def test_a_reduction_that_begins_after_backward_is_waited_for_whole(predict: Predict) -> None:
    """Rows name what is beside backward; two ranks of a node send half of a sum each, twice."""
    job = {"dp": "2", "gpus": "2", "global_batch": "32"}
    beside, after = predict(
        text(beside={**job, "overlap": "dp tp"}, after={**job, "overlap": "tp"})
    ).values()
    # float32
    gradients = 4 * (4 * (4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 8192 * 1024 + 1024)
    sums = gradients / 360e9
    assert sums < after["parts"]["dp"] < 1.1 * sums
    assert beside["parts"]["dp"] < 0.5 * after["parts"]["dp"]


def test_a_congested_network_is_as_slow_as_the_jobs_all_reduce(predict: Predict) -> None:
    """Twice the measured bandwidth is half the time that the reduction of gradients adds."""
    job = {
        "dp": "128",
        "gpus": "128",
        "global_batch": "2048",
        "hidden": "4096",
        "heads": "32",
        "ffn": "16384",
    }
    found: Any = predict(
        text(fast=job, slow={**job, "allreduce_gbs": "10"}, slower={**job, "allreduce_gbs": "5"})
    )
    healthy, slow, slower = (found[name]["parts"]["dp"] for name in ("fast", "slow", "slower"))
    assert 4 * healthy < slow
    assert 1.5 * slow < slower < 2 * slow


def test_a_given_profile_serves_for_all_frameworks(
    predict: Predict, frameworks: Any, tmp_path: Path
) -> None:
    """Its seconds of a step besides are added to each; without it, those of each row's own."""
    own = tmp_path / "own.toml"
    default = frameworks.profile(frameworks.DEFAULT)
    numbers = attrs.asdict(attrs.evolve(default, step=default.step + 2))
    own.write_text("\n".join(f"{name} = {value}" for name, value in numbers.items()))
    rows = text(here={}, there={"framework": "nanotron"})
    plain, given = predict(rows), predict(rows, "--profile", str(own))
    assert given["here"]["step_s"] == given["there"]["step_s"]
    assert given["here"]["step_s"] - predict(text(here={"framework": "another"}))["here"][
        "step_s"
    ] == pytest.approx(2)
    assert plain["here"]["step_s"] != plain["there"]["step_s"]


def test_the_host_issues_embedding_and_head_by_their_kernels_and_not_beside_layers(
    predict: Predict, frameworks: Any, tmp_path: Path
) -> None:
    """They start fewer kernels than a layer, but a large vocabulary keeps the GPU busy while no
    layer is issued.
    """
    default = attrs.asdict(frameworks.profile(frameworks.DEFAULT))

    def seconds(host: float, layers: int, vocab: int, **more: str) -> float:
        own = tmp_path / "own.toml"
        own.write_text(
            "\n".join(f"{name} = {value}" for name, value in (default | {"host": host}).items())
        )
        row = {"layers": f"{layers}", "vocab": f"{vocab}", **more}
        return float(predict(text(row=row), "--profile", str(own))["row"]["step_s"] or 0)

    microbatches, host = 8, 1.0
    few, many = (seconds(host, layers, 8192) for layers in (4, 8))
    assert many - few == pytest.approx(microbatches * 4 * host, rel=1e-3)
    outside = (few - default["step"]) / (microbatches * host) - 4
    # of a layer: an embedding, a norm, a product and a loss, with their gradients
    assert 0.1 < outside < 0.4
    busy = [seconds(host, 4, 1 << 20) - seconds(host, 4, 8192) for host in (1e-6, 0.02)]
    assert busy[0] > busy[1] > busy[0] - microbatches * outside * 0.02
    fewer, more = (seconds(host, layers, 8192, cp="2", gpus="2") for layers in (4, 8))
    # a ring is issued hop by hop
    assert more - fewer == pytest.approx(1.26 * (many - few), rel=1e-3)


def test_the_fastest_row_of_a_cell_is_looked_for_among_the_first_three(
    predict: Predict, capsys: pytest.CaptureFixture[str]
) -> None:
    """Larger microbatches are predicted to be faster; measured is the opposite, then the same."""
    sizes = {"1": "16", "2": "8", "4": "4", "8": "2"}

    def row(cell: str, batch: str, seconds: float) -> dict[str, str]:
        return {
            "cell": cell,
            "micro_batch": batch,
            "microbatches": sizes[batch],
            "step_s": f"{seconds}",
        }

    rows = {f"good{it}": row("good", it, 8 - at) for at, it in enumerate(sizes)}
    rows |= {f"bad{it}": row("bad", it, 8 + 2 * at) for at, it in enumerate(sizes)}
    predict(text(**rows, **{"alone": row("alone", "1", 1)}))
    printed = capsys.readouterr().out.split("The fastest row of a cell")[1]
    assert "| all        | 2     | 50.0%          | 37.5%       | 67.5% |" in printed


def test_slopes_of_a_fit_are_those_of_numbers_moved_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows of three frameworks, one without a profile, which only the shared constants move."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module, training = (
        importlib.import_module("fit_profiles"),
        importlib.import_module("predicting.training"),
    )
    given = {
        "tp": {**KINDS["tp"], "framework": "nanotron"},
        "zero": KINDS["zero"],
        "other": {"framework": "another", "attention": "unfused"},
    }
    (tmp_path / "rows.csv").write_text(
        text(**{name: {**row, "step_s": "1"} for name, row in given.items()})
    )
    fit = module.fit_of(training.read_work(read_rows(tmp_path / "rows.csv"), {}).batch)
    off, one = numpy.log(fit.predicted(fit.prior)), 1e-4 * numpy.eye(len(fit.names))
    slopes = numpy.array([numpy.log(fit.predicted(fit.prior + step)) - off for step in one]) / 1e-4
    assert numpy.abs(slopes).max() > 0.1
    assert fit.slopes(fit.prior) == pytest.approx(slopes, abs=1e-6)


def test_a_number_that_is_held_stays_at_its_prior_and_errors_of_others_grow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources whose steps take a second longer than predicted: seconds of a step besides,
    and no other number.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fits, module = importlib.import_module("fit_profiles"), importlib.import_module("left_out")
    training = importlib.import_module("predicting.training")
    rows = {
        name: {"source": name, "layers": layers}
        for name, layers in (("first", "4"), ("second", "8"))
    }
    file = tmp_path / "rows.csv"

    def get_fit(seconds: Mapping[str, float]) -> Any:
        file.write_text(
            text(**{name: {**row, "step_s": f"{seconds[name]}"} for name, row in rows.items()})
        )
        return fits.fit_of(training.read_work(read_rows(file), {}).batch)

    plain = get_fit(dict.fromkeys(rows, 1.0))
    longer = plain.predicted(plain.prior) + 1
    fit = get_fit(dict(zip(rows, longer, strict=True)))
    held = module.get_held(fit, "step")
    at = fit.names.index(("torchtitan", "step"))
    best, best_held = (module.get_best(each, read_rows(file)) for each in (fit, held))
    assert best[at] > fit.prior[at] + 1
    assert best_held[at] == pytest.approx(fit.prior[at], abs=0.01)
    errors = [
        module.get_mean_error(fit, read_rows(file), of.predicted(of_best))
        for of, of_best in ((fit, best), (held, best_held))
    ]
    assert errors[0] < 0.1 < errors[1]
    monkeypatch.setattr(module, "SPREAD", {"step": 1.0})
    monkeypatch.setattr(module, "CONSTANTS", {})
    module.print_factors(fit, read_rows(file), longer, longer)
    printed = capsys.readouterr().out
    assert "| none | 0.00%    | 0.00%" in printed
    assert f"| {errors[1]:.2%}" in printed


def test_rows_without_a_time_or_a_cluster_are_predicted_as_those_with_one(predict: Predict) -> None:
    found = predict(text(timed={"step_s": "2.5"}, open={"cluster": ""}, failed={"status": "oom"}))
    assert found["timed"] == found["open"] == found["failed"]


def test_profiles_are_numbers_that_a_frameworks_name_finds(frameworks: Any) -> None:
    profile_of = frameworks.profile_of
    assert {profile_of(name) for name in ("megatron-2021", "Megatron-LM", "megatron")} == {
        "megatron"
    }
    assert profile_of("megatron-deepspeed-2022") == "megatron_deepspeed"
    assert profile_of("another") == frameworks.DEFAULT
    assert len(frameworks.NUMBERS) <= 12
    for name in frameworks.profiles():
        assert 0 < frameworks.profile(name).host < 1


def test_shipped_clusters_describe_hardware() -> None:
    for path in (FOLDER / "clusters").glob("*.toml"):
        assert path.stem.startswith(load(path).name), path


def test_no_row_source_or_model_of_published_files_is_named_in_code_or_profiles() -> None:
    """Neither fits nor formulas may know the rows that they are scored on."""
    beside = (folder / "shared" / "published" for folder in BENCHMARKS.resolve().parents)
    published = next((folder for folder in beside if folder.is_dir()), None)
    if published is None:
        pytest.skip("no published measurements beside the repository")
    names = set[str]()
    for file in ("train", "memory", "pipeline"):
        for row in read_rows(published / f"{file}.csv"):
            names |= {
                row.get(column) or "" for column in ("id", "source", "model", "test_case", "cell")
            }
    names |= {row["cluster"] for row in read_rows(published / "clusters.csv")}
    names = {name for name in names if len(name) > 4}
    folders = (BENCHMARKS / "predicting", FOLDER, FOLDER.parent / "time")
    files = [path for it in folders for path in it.rglob("*") if path.suffix in (".py", ".toml")]
    written = "\n".join(
        path.read_text()
        for path in (*files, BENCHMARKS / "predict.py", BENCHMARKS / "fit_profiles.py")
    )
    assert {name for name in names if name in written} == set()


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]
