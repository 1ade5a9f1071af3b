"""Rows of published measurements: what is read, predicted and written of a file of each kind."""

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

Predict = Callable[[str], Mapping[str, Mapping[str, float | str | None]]]

PIPELINE = "id,layers,hidden,heads,seq,gpu,pp,schedule,micro_batch,microbatches,samples_s_gpu,bubble_rate,\
T_F_ms,T_B_ms,T_W_ms,T_comm_ms"


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Predicts the rows of a file's text."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def predicted(text: str) -> Mapping[str, Mapping[str, float | str | None]]:
        (tmp_path / "rows.csv").write_text(text)
        (tmp_path / "clusters.csv").write_text("cluster,node_gbit_s\n")
        out = tmp_path / "out.json"
        monkeypatch.setattr("sys.argv", ["predict.py", str(tmp_path / "rows.csv"), "--json", str(out)])
        runpy.run_path(str(BENCHMARKS / "predict.py"), run_name="predict")["main"]()
        return json.loads(out.read_text())["rows"]

    return predicted


def test_pipelines_of_profiled_stages_have_the_bubble_of_their_schedule(predict: Predict) -> None:
    """1F1B of stages without messages waits p - 1 of m + p - 1 times, H1 for what W does not fill, ZB-2p nothing."""
    each = "6,512,8,1024,A100-80GB,4,{},1,16,,,2,2,2,0"
    names = {"1F1B": 3 / 19, "ZB-H1": 1 / 17, "ZB-1p": 1 / 17, "ZB-2p": 0.0}
    rows = [f"{name},{each.format(name)}" for name in names]
    found = predict("\n".join((PIPELINE, *rows, "formula,,,,,,,1F1B,,,,,,,,")))
    assert {name: found[name]["bubble_rate"] for name in names} == pytest.approx(names)
    assert found["formula"] == {"samples_s_gpu": None, "bubble_rate": None, "why": "a formula, without sizes"}


def test_stages_that_nobody_profiled_are_priced_or_taken_from_a_row_of_the_same_model(predict: Predict) -> None:
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


def test_reserved_memory_is_that_of_the_state_and_of_microbatches_in_flight(predict: Predict) -> None:
    """18 bytes a parameter, of which ZeRO 1 divides 12; the first stage of four holds four microbatches."""

    def row(name: str, dp: int, pp: int, zero: int, batch: int) -> str:
        sizes = "8,4096,8192,32,32,128,512,yes,no,512"
        parts = f"{dp},1,no,1,{pp},1,{zero},{batch},8,{8 * dp * batch},none,bf16,ok,,"
        return f"{name},x,other,,h100_sxm,8,{sizes},{parts}"

    rows = [row("whole", 1, 1, 0, 1), row("zero", 4, 1, 1, 1), row("staged", 1, 4, 0, 1), row("large", 1, 1, 0, 64)]
    found = predict("\n".join((TRAIN, *rows)))
    layer, outer = 4 * 4096**2 + 3 * 4096 * 8192 + 2 * 4096, 2 * 512 * 4096 + 4096
    sizes = {name: it["memory_gib"] for name, it in found.items()}
    whole, zero, staged = (float(sizes[name] or 0) * 2**30 for name in ("whole", "zero", "staged"))
    assert whole - zero == pytest.approx(12 * (8 * layer + outer) * 3 / 4)
    assert whole - staged == pytest.approx(18 * (6 * layer + outer / 2), rel=0.05)  # and what the loss keeps
    assert (found["whole"]["fits"], found["large"]["fits"]) == (True, True)
    assert predict("\n".join((TRAIN, row("huge", 1, 1, 0, 512))))["huge"]["fits"] is False


MEMORY = "id,layers,hidden,ffn,heads,vocab_arg,seq,gpu,dp,distributed_optimizer,tp,sp,cp,pp,vpp,experts,micro_batch,\
recompute,dtype,other_args"


def test_allocated_memory_is_that_of_the_last_rank_with_its_layers_scores_and_logits(predict: Predict) -> None:
    """What differs between two tests is what one has of layers, state or scores that the other lacks."""

    def row(name: str, optimizer: str, pp: int, more: str, experts: str = "") -> str:
        return f"{name},8,256,,4,,512,H100 (DGX),4,{optimizer},1,no,1,{pp},,{experts},2,none,bf16,{more}"

    rows = [
        row("plain", "no", 1, ""),
        row("sharded", "yes", 1, ""),
        row("unfused", "no", 1, "attention-backend=unfused"),
        row("staged", "no", 4, ""),
        row("experts", "no", 1, "", "8"),
    ]
    found = predict("\n".join((MEMORY, *rows)))
    static, peak = (
        {name: float(it[key] or 0) * 2**30 for name, it in found.items()} for key in ("static_gib", "peak_gib")
    )
    layer, table = 12 * 256**2 + 13 * 256, (50304 + 512) * 256 + 2 * 256
    assert static["plain"] - static["sharded"] == pytest.approx(12 * 3 / 4 * (8 * layer + table))
    message = 2 * 2 * 512 * 256
    assert static["plain"] - static["staged"] == pytest.approx(18 * (6 * layer + 512 * 256) - 3 * message)
    assert peak["unfused"] - peak["plain"] == pytest.approx(8 * 5 * 2 * 4 * 512**2)
    assert found["experts"] == {"static_gib": None, "peak_gib": None, "why": "experts"}
