"""Which tiles a program has: those of its chip, its sizes and its element type."""

import tomllib
from pathlib import Path

import pytest
from attrs import evolve

from helpers.kernels.programs import compiled
from scalec.compiler.analysis import kernel_tiles as table
from scalec.compiler.analysis.kernel_tiles import KERNELS, kernels_of, nearest, tiles_of
from scalec.compiler.syntax.limits import load

TILES = tomllib.loads(Path(table.__file__).with_name("tiles.toml").read_text())
PLANS = Path(__file__).parents[2] / "plans"


@pytest.mark.parametrize(
    ("plan", "gpu", "precision", "chip", "name"),
    [
        ("llama3_8b", "h100_sxm", "bf16", "sm_90", "Attention"),
        ("llama3_8b", "h100_sxm", "fp32", "sm_90", "Attention32"),
        ("llama3_8b", "rtx_4090", "fp32", "sm_80", "Attention32"),
        ("gemma2_9b", "h100_sxm", "bf16", "sm_90", "Attention"),
        ("gemma2_9b", "h100_sxm", "fp32", "sm_90", ""),
    ],
)
def test_attention_has_blocks_for_its_element_type(
    plan: str, gpu: str, precision: str, chip: str, name: str
) -> None:
    source = load(PLANS / f"{plan}.scale")
    text = source.text.replace("precision = bf16", f"precision = {precision}")
    program = compiled(evolve(source, text=text), gpu)
    (used,) = (it for it in kernels_of(program) if it.name == "Attention")
    dim = {"llama3_8b": 128, "gemma2_9b": 256}[plan]
    if not name:
        assert used.tiles == ()
        return
    assert used.tiles == ((dim, TILES[chip][name][str(dim)]),)


def test_a_chip_has_the_classes_of_older_ones_and_a_size_the_next_larger_tile() -> None:
    tiles = tiles_of("sm_100")
    assert {kernel.tuned for kernel in KERNELS.values()} <= {*tiles}
    assert tiles["RMSNorm"] is not tiles_of("sm_90")["RMSNorm"]
    assert tiles["Rope"] is tiles_of("sm_80")["Rope"]
    norms = tiles["RMSNorm"]
    assert [nearest(norms, size) for size in (1, 3072, 4096, 10**6)] == [
        *(norms["64"], norms["3584"], norms["4096"], norms["16384"])
    ]


@pytest.mark.parametrize(
    ("precision", "name"), [("bf16", "GroupedLinear"), ("fp32", "GroupedLinear32")]
)
def test_products_of_experts_have_blocks_for_each_width_of_their_rows(
    precision: str, name: str
) -> None:
    source = load(PLANS / "qwen3_30b_a3b.scale")
    program = compiled(
        evolve(source, text=source.text.replace("= bf16", f"= {precision}")), "h100_sxm"
    )
    sizes = {used.function: used.tiles for used in kernels_of(program)}
    blocks = TILES["sm_80"][name]["4096"]
    assert sizes["grouped_linear"] == ((768, blocks), (2048, blocks))
    assert {size for each in ("combine", "dispatch") for size, _ in sizes[each]} == {2048}
    assert {size for each in ("sort_by_expert", "top_k") for size, _ in sizes[each]} == {128}
