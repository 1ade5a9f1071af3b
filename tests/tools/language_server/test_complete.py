"""Completion: the words for a place, marked `|`, by what is written before it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.tools.language_server.complete import Item, call_at, complete
from scalec.tools.language_server.document import Document, compile_document, parse_document

PLAN = Path(__file__).parents[3] / "examples" / "06_mlp.scale"
MODEL = "model m(tokens[batch, seq], labels[batch, seq]) {\n"


@pytest.fixture(scope="module")
def mlp() -> Document:
    return compile_document(parse_document(None, load(PLAN)))


def offered(document: Document, text: str) -> list[Item]:
    """The words that are offered at `|` in a text, which need be no plan, after one that was."""
    before, _, after = text.partition("|")
    now = parse_document(document, Source(document.source.path, before + after))
    return complete(now, before.count("\n") + 1, len(before) - before.rfind("\n"))


@pytest.mark.parametrize(
    ("text", "wanted", "others"),
    [
        ("|", "use model op mesh shard names cluster pipeline state train watch", "lr batch"),
        ("mesh { dp = 2 }\ntr|", "train shard", "dp lr"),
        ("train { |", "seq steps optimizer data precision", "lr dp"),
        ("train { seq = 128  |", "steps", "seq"),
        ("train { precision = |", "bf16 fp32", "seq"),
        ("train { recompute = |", "none full auto", "seq"),
        ("train { precision = bf16  optimizer adamw { |", "lr betas", "momentum seq"),
        ("train { optimizer |", "adamw sgd", "lr seq"),
        ("train { data |", "text tokens", "files seq"),
        ("train { optimizer sgd { |", "lr momentum", "betas"),
        ("train { optimizer adamw { schedule = |", "cosine constant", "lr"),
        ("train { optimizer adamw { schedule = cosine(|", "warmup floor", "lr"),
        ("train { data text { files = [|", "python_stdlib", "files hidden"),
        ("cluster { gpu = |", "h100_sxm b200", "memory"),
        ("pipeline { schedule = |", "1f1b gpipe auto", "chunks"),
        ("pipeline { schedule = interleaved_1f1b(|", "chunks", "gpipe"),
        ("mesh { |", "dp tp pp", "batch"),
        ("mesh { dp = |", "", "dp tp"),
        ("shard { |", "batch ffn hidden", "dp over via"),
        ("shard { batch |", "over", "dp via"),
        ("shard { batch over |", "dp tp", "batch over"),
        ("shard { batch over dp, |", "tp", "batch"),
        ("shard { batch over dp  |", "as via ffn", "over"),
        ("shard { batch over dp  vocab, |", "ffn hidden", "dp over as"),
        ("shard { batch over dp, tp  vocab |", "over", "dp as"),
        ("shard { seq over tp as |", "zigzag contiguous", "dp"),
        ("shard { seq over tp via |", "ring ulysses gather auto", "dp"),
        ("state { |", "zero optimizer prefetch", "dp"),
        ("state { zero 1 over |", "dp tp", "prefetch"),
        ('use "m.scale" { |', "dims const train mesh shard", "repeat lr"),
        ('use "m.scale" { dims { |', "hidden ffn", "dp eps"),
        ("model m(tokens[|", "batch seq", "x dp"),
        (MODEL + "  |", "repeat route init dims x attention", "dp train"),
        (MODEL + "  init ~ |", "normal ones zeros", "x attention sqrt"),
        (MODEL + "  route x to experts by |", "top", "x attention"),
        (MODEL + "  repeat |", "layers", "x attention"),
        (MODEL + "  x = rms|", "rmsnorm x wte", "repeat dp"),
        (MODEL + "  x = y @ w[hidden -> |", "ffn hidden", "x attention"),
        (MODEL + "  x = attention(x, |", "mask= window= x", "repeat"),
        (MODEL + "  x = attention(x, x, x, mask=|", "causal full", "x window="),
        (MODEL + "  repeat layers {\n    |", "x attention repeat", "train"),
        (MODEL + "}\ntrain { |", "seq", "x repeat"),
        ("mesh { dp = 2 } # a comment |", "", "train"),
        ('use "a str|', "", "train"),
    ],
)  # fmt: skip
def test_words_for_a_place(mlp: Document, text: str, wanted: str, others: str) -> None:
    labels = {item.label for item in offered(mlp, text)}
    assert set(wanted.split()) <= labels
    assert not labels & set(others.split())


@pytest.mark.parametrize(
    ("words", "op", "given"),
    [
        ("x = rmsnorm(|", "rmsnorm", "x"),
        ("x = rmsnorm(x, |", "rmsnorm", "weight"),
        ("x = rmsnorm(x + silu(y), w[hidden, ffn], |", "rmsnorm", "eps"),
        ("x = attention(q, k, v, window=|", "attention", "window=0"),
        ("x = a + |", "", ""),
        ("x = nothing(|", "", ""),
    ],
)
def test_the_word_of_a_signature_that_is_due(words: str, op: str, given: str) -> None:
    text = MODEL + words.removesuffix("|")
    found = call_at(
        Document(Source("any", text)), text.count("\n") + 1, len(text) - text.rfind("\n")
    )
    assert (found and (found[0].name, found[1][found[2]])) == ((op, given) if op else None)


def test_words_have_their_size_and_their_meaning(mlp: Document) -> None:
    found = {item.label: item for item in (*offered(mlp, "shard { |"), *offered(mlp, "train { |"))}
    assert found["ffn"].detail == "256"
    assert found["steps"].doc == "optimizer steps"


def test_words_of_settings_need_no_earlier_plan() -> None:
    assert {"lr", "betas"} <= {
        item.label for item in offered(Document(Source("new", "")), "train { optimizer adamw { |")
    }


TOKENS = (
    'train { } model x ( ) [ ] = , over repeat shard state mesh zero 1 + "a # \n use dims'
    " optimizer adamw route to ~ .."
)


@given(words=st.lists(st.sampled_from(TOKENS.split(" ")), max_size=12))
def test_no_words_break_it(words: list[str]) -> None:
    offered(Document(Source("any", "")), f"{' '.join(words)} |")


def test_no_place_of_a_plan_breaks_it(mlp: Document) -> None:
    text = mlp.source.text
    for at in range(0, len(text), 3):
        offered(mlp, f"{text[:at]}|")
