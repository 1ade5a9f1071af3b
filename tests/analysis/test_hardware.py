"""Hardware read from files, and measured seconds between those that were measured."""

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from scalec.compiler.analysis.hardware import (
    DATA_SHEETS,
    Attention,
    Collective,
    Measured,
    Moved,
    Product,
    find_shipped_gpu,
    load,
)
from scalec.compiler.analysis.hardware.files import FOLDER
from scalec.compiler.cli import main
from scalec.compiler.config.gpus import GPUS
from scalec.compiler.syntax.diagnostics import PlanError

PLANS = Path(__file__).parents[2] / "plans"

OWN = """
[cluster]
gpu = "a100_80gb"

[gpu]
held = { bf16 = 0.8 }

[host]
op = 1e-6

[[link]]
name = "node"
ranks = 4
bandwidth = 100e9

[[product]]
dtype = "bf16"
m = 128
n = 256
k = 512
batch = 1
seconds = 1e-4
"""


@pytest.mark.parametrize("gpu", GPUS)
def test_each_known_gpu_has_a_data_sheet(gpu: str) -> None:
    found = find_shipped_gpu(gpu)
    assert found
    assert (found.name, found.source) == (gpu, DATA_SHEETS)
    assert {"bf16", "f16", "f32", "f64"} <= set(found.peak)


TYPES = {0: ("f64", "f32", "bf16", "f16"), 89: ("fp8",), 100: ("mxfp8", "nvfp4")}
"""Element types of products, by the first compute capability that has them (CUDA C++
programming guide).
"""


@pytest.mark.parametrize("gpu", GPUS)
def test_each_gpu_has_a_peak_for_each_type_of_its_architecture(gpu: str) -> None:
    found = find_shipped_gpu(gpu)
    assert found
    for capability, types in TYPES.items():
        for dtype in types:
            if GPUS[gpu].capability >= capability:
                assert found.peak_rate(dtype) == found.peak[dtype]


@pytest.mark.parametrize("gpu", [name for name in GPUS if GPUS[name].capability >= 89])
def test_narrow_types_have_dense_peaks(gpu: str) -> None:
    """A figure with sparsity, which data sheets print larger, is twice as high."""
    found = find_shipped_gpu(gpu)
    assert found
    assert found.peak["fp8"] / found.peak["bf16"] == pytest.approx(2, rel=0.02)
    if "nvfp4" in found.peak:
        assert 2 <= found.peak["nvfp4"] / found.peak["fp8"] <= 4.01


def test_gpus_with_a_data_sheet_and_gpus_with_memory_are_the_same() -> None:
    """One of them alone would have seconds and nothing to fit into, or memory and no seconds."""
    assert {path.stem for path in (FOLDER / "gpus").glob("*.toml")} == set(GPUS)


def test_a_file_says_where_it_differs_from_a_shipped_gpu(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    found, base = load(path), find_shipped_gpu("a100_80gb")
    assert base
    assert (found.name, found.peak, found.network) == (base.name, base.peak, base.network)
    assert (found.product_rate("f32"), found.op, found.link) == (
        0.8 * base.peak["f32"],
        1e-6,
        100e9,
    )
    assert (found.ranks_per_node, found.link_latency) == (4, base.link_latency)
    assert found.measured.products == (Product("bf16", 128, 256, 512, 1, 1e-4),)
    assert (found.source, found.error) == ("mine.toml", 0.05)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu = ", "is not TOML"),
        ("[gpus]", "has no `gpus`"),
        ('[cluster]\ngpu = "a100"', "there is no GPU `a100`"),
        (
            "[gpu]\nsms = 3",
            "lacks `name`, `peak`, `memory`, `held`, `attention`, `link`, `network`",
        ),
        ("[host]\nop = -1", "`host.op` takes numbers of at least 0, not -1"),
        ("[host]\nop = 'fast'", "not 'fast'"),
        (
            "[[link]]\nname = 'node'\nlatency = -1",
            "`link.latency` takes numbers of at least 0, not -1",
        ),
        (
            "[[link]]\nname = 'adapters'\nbandwidth = 0",
            "`link.bandwidth` takes numbers above 0, not 0",
        ),
        ("[gpu]\nheld = { bf16 = 0 }", "`gpu.held` takes numbers above 0"),
        ("[gpu]\npeak = 1e12", "takes a number for each element type"),
        ("[gpu]\nheld = {}", "takes a number for each element type"),
        (
            "[gpu]\ntorch_attention = 'flash9'",
            "`gpu.torch_attention` is one of `flash2`, `cudnn`, not 'flash9'",
        ),
        ("[[link]]\nname = 'rail'", "is one of `node`, `adapters`, not 'rail'"),
        ("[[product]]\nm = 1", "lacks `dtype`, `n`, `k`, `batch`, `seconds`"),
        ("[[moved]]\nop = 'silu'\nbytes = 0\nseconds = 1", "numbers of a `[[moved]]` are above 0"),
        ("gpu = 3", "`[gpu]` is a table"),
        ("[[host]]\nop = 1", "`[host]` is a table"),
        ("[link]\nname = 'node'", "`[link]` is a list of tables"),
        ("product = [3]", "`[product]` is a table"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as error:
        load(path)
    (found,) = error.value.diagnostics
    assert found.code == "E0418"
    assert told in found.message


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="E0418"):
        load(tmp_path / "none.toml")


def test_a_type_that_holds_no_known_part_of_its_peak_holds_the_least() -> None:
    sheet = find_shipped_gpu("h100_sxm")
    assert sheet
    found = evolve(
        sheet, peak={"bf16": 4e12, "f32": 1e12, "f64": 1e12}, held={"bf16": 0.5, "f32": 0.8}
    )
    assert [found.product_rate(dtype) for dtype in ("bf16", "f32", "f64")] == [2e12, 0.8e12, 0.5e12]


def test_a_type_without_a_peak_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[cluster]\ngpu = "a100_80gb"\n[gpu]\npeak = { bf16 = 1e12 }\n')
    with pytest.raises(PlanError) as error:
        load(path).product_rate("f32")
    (found,) = error.value.diagnostics
    assert (found.code, found.span.path) == ("E0418", str(path))
    assert "`a100_80gb` for `f32` is not known: mine.toml has `bf16`" in found.message
    assert "add `f32 = …`" in found.help


def test_a_plan_whose_products_have_no_peak_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(
        '[cluster]\ngpu = "a100_80gb"\n[gpu]\npeak = { f64 = 1e12 }\n'
    )
    plan = tmp_path / "plan.scale"
    plan.write_text(f'use "{PLANS / "tiny_llama.scale"}"\ncluster {{ hardware = "mine.toml" }}\n')
    assert main(["explain", "time", str(plan)]) == 1
    printed = capsys.readouterr().err
    assert "E0418" in printed
    assert "for `f32` is not known: mine.toml has `f64`" in printed
    assert "plan.scale:2" in printed


MEASURED = Measured(
    products=(Product("bf16", 256, 256, 256, 1, 1e-5), Product("bf16", 512, 512, 512, 1, 4e-5)),
    attention=(Attention("flash", 64, 512, 1e12, 5e11), Attention("flash", 64, 2048, 2e12, 8e11)),
    moved=(Moved("silu", 1000, 1e-5), Moved("silu", 100_000, 1e-4)),
    collectives=(
        Collective("all_reduce", 4, 1, 1000, 1e-5),
        Collective("all_reduce", 4, 1, 10**6, 1e-3),
    ),
)


def test_measured_seconds_are_given_back() -> None:
    assert MEASURED.product("bf16", 256, 256, 256, 1) == pytest.approx(1e-5, rel=1e-4)
    assert MEASURED.seconds_of("silu", 100_000) == pytest.approx(1e-4)
    assert MEASURED.collective("all_reduce", 4, 1, 1000) == pytest.approx(1e-5)
    assert MEASURED.attention_rate("flash", 64, 2048, backward=True) == pytest.approx(8e11)


def test_nothing_is_said_of_what_is_far_from_all_that_was_measured() -> None:
    assert MEASURED.product("f32", 256, 256, 256, 1) is None
    assert MEASURED.product("bf16", 256, 256, 2560, 1) is None
    assert MEASURED.seconds_of("gelu", 1000) is None
    assert MEASURED.collective("all_reduce", 8, 1, 1000) is None
    assert MEASURED.attention_rate("other", 64, 512, backward=False) is None


@given(st.floats(100, 1e9), st.floats(1, 100))
def test_more_bytes_never_take_less_time(bytes: float, times: float) -> None:
    less, more = (MEASURED.seconds_of("silu", size) for size in (bytes, bytes * times))
    assert less
    assert more
    assert less <= more * (1 + 1e-9)


@given(st.integers(250, 520))
def test_products_between_measured_ones_have_a_rate_between_theirs(m: int) -> None:
    found = MEASURED.product("bf16", m, m, m, 1)
    assert found
    slow, fast = sorted((256**3 / 1e-5, 512**3 / 4e-5))
    assert slow * (1 - 1e-9) <= m**3 / found <= fast * (1 + 1e-9)
