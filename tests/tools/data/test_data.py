"""`scalec data`: ids, what of them counts, and folders whose bytes are the sources' alone."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from helpers.small_tokenizer import MARKED, TEXT, unmarked, write_tokenizer
from scalec.compiler.cli import main
from scalec.formats.token_folder import TokenFolder, TokenFolderError
from scalec.tools.data.sources import BadRecord, Record, make_stretches, read_records

Run = Callable[..., str]

ASKED = {"role": "user", "content": "What does a ring pass?"}
SAID = {"role": "assistant", "content": "Keys, from rank to rank."}
SAYS = {"role": "system", "content": "Be brief."}
CHATS: list[list[dict[str, str]]] = [
    [ASKED, SAID],
    [SAYS, ASKED, SAID, {"role": "user", "content": "And é你 ?"}, {**SAID, "content": " é你, too"}],
    [ASKED, {**SAID, "content": "<|im_end|> is said"}, ASKED, SAID, ASKED, SAID],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a template."""
    return write_tokenizer(tmp_path_factory.mktemp("model"), unmarked(MARKED["chatml"]))


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Path,
) -> Run:
    """`run(*words)` is what the command prints; `status` is its exit status."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, status: int = 0) -> str:
        command = ["data", "-o", "out", "--tokenizer", str(model), "--workers", "1", *words]
        assert main(command) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run


def write_lines(path: str, *records: Any) -> str:
    """A file of JSON lines."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def tokens_of(folder: str | Path) -> np.ndarray[Any, Any]:
    """All ids of a folder."""
    files = sorted(Path(folder).glob("tokens-*.bin"))
    return np.concatenate([np.fromfile(file, dtype="<u2") for file in files])


def counted_of(folder: str | Path) -> np.ndarray[Any, Any]:
    """For all ids of a folder whether they count."""
    index = TokenFolder.read(folder)
    parts = list[np.ndarray[Any, Any]]()
    for number, shard in enumerate(index.shards):
        packed = np.fromfile(Path(folder) / f"counts-{number:05}.bin", dtype=np.uint8)
        parts.append(np.unpackbits(packed, bitorder="little")[: shard.tokens])
    return np.concatenate(parts).astype(bool)


def texts_of(folder: str | Path, model: Path) -> list[str]:
    """The documents of a folder of one shard, decoded, with ⟦ ⟧ around what counts."""
    sample = (Path(folder) / "sample.txt").read_text(encoding="utf-8")
    return re.split(r"(?m)^--- document .*\n", sample)[1:]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", MARKED)
def test_ids_and_what_counts_are_transformers_own(
    name: str, marked: bool, run: Run, model: Path
) -> None:
    template = MARKED[name]
    Path("template.jinja").write_text(template if marked else unmarked(template))
    write_lines("chat.jsonl", *({"messages": chat} for chat in CHATS))
    run("chat.jsonl", "--chat", "messages", "--template", "template.jinja")
    reference: Any = PreTrainedTokenizerFast(
        tokenizer_file=str(model / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    ids, counted = list[int](), list[int]()
    for chat in CHATS:
        encoded = reference.apply_chat_template(
            chat, chat_template=template, return_assistant_tokens_mask=True, return_dict=True
        )
        ids += encoded["input_ids"]
        counted += encoded["assistant_masks"]
    assert tokens_of("out").tolist() == ids
    assert counted_of("out").tolist() == [*map(bool, counted)]
    assert 0 < sum(counted) < len(counted)


FORGETS = (
    "{% for m in messages %}{{ m.role }}:"
    "{{ m.content if loop.last else m.content | replace('think', '') }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_template_that_changes_earlier_turns_is_refused_by_name(run: Run) -> None:
    Path("template.jinja").write_text(FORGETS)
    chat = [ASKED, {**SAID, "content": "think keys"}, ASKED, SAID]
    write_lines("chat.jsonl", {"messages": chat})
    options = ("chat.jsonl", "--chat", "messages", "--template", "template.jinja")
    refused = run(*options, status=2)
    assert (
        "chat.jsonl:1: the template refuses it: earlier turns are rendered differently" in refused
    )
    run(*options, "--last-turn")
    assert counted_of("out").sum() > 0


def test_a_template_cannot_reach_out_of_its_sandbox(run: Run) -> None:
    Path("template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    write_lines("chat.jsonl", {"messages": [ASKED, SAID]})
    refused = run("chat.jsonl", "--chat", "messages", "--template", "template.jinja", status=2)
    assert "the template refuses it: access to attribute '__class__'" in refused


def test_a_document_ends_with_the_tokenizers_token(run: Run, model: Path) -> None:
    write_lines("a.jsonl", {"text": "one ring"}, {"text": "two"})
    printed = run("a.jsonl")
    assert re.match(r"out: \d+ tokens of uint16 in 2 documents, 1 shards\n", printed)
    assert texts_of("out", model) == ["one ring</s>\n", "two</s>\n"]
    run("a.jsonl", "-o", "bare", "--eos", "", "--bos", "<s>")
    assert texts_of("bare", model) == ["<s>one ring\n", "<s>two\n"]


def test_prompts_do_not_count_and_answers_do(run: Run, model: Path) -> None:
    write_lines("a.jsonl", {"q": "two and two? ", "a": "four"})
    run("a.jsonl", "--prompt", "q", "--answer", "a")
    assert texts_of("out", model) == ["two and two? ⟦four</s>⟧\n"]


def test_pairs_are_two_documents_of_a_record(run: Run, model: Path) -> None:
    record = {"prompt": "name it: ", "good": "ring", "bad": "tree"}
    write_lines("a.jsonl", record, {**record, "good": [SAID], "bad": [{**SAID, "content": "no"}]})
    run("a.jsonl", "--pair", "good", "bad")
    index = TokenFolder.read("out")
    assert (index.documents, index.recipe.pair) == (4, True)
    assert texts_of("out", model)[:2] == ["name it:⟦ ring⟧\n", "name it:⟦ tree⟧\n"]
    assert "⟦Keys, from rank to rank.<|im_end|>⟧" in texts_of("out", model)[2]


def test_ids_that_are_there_already_are_taken(run: Run) -> None:
    write_lines("a.jsonl", {"input_ids": [5, 6, 7]}, {"input_ids": [8]})
    run("a.jsonl", "--ids", "input_ids")
    assert tokens_of("out").tolist() == [5, 6, 7, 8]


def _write_gzip(lines: bytes) -> str:
    Path("a.jsonl.gz").write_bytes(gzip.compress(lines))
    return "a.jsonl.gz"


def _write_zstandard(lines: bytes) -> str:
    Path("a.jsonl.zst").write_bytes(zstandard.compress(lines))
    return "a.jsonl.zst"


def _table(lines: bytes) -> Any:
    return pyarrow.Table.from_pylist([json.loads(line) for line in lines.splitlines()])


def _write_parquet(lines: bytes) -> str:
    pyarrow.parquet.write_table(_table(lines), "a.parquet", row_group_size=2)
    return "a.parquet"


def _write_arrow(lines: bytes) -> str:
    with pyarrow.ipc.new_stream("a.arrow", _table(lines).schema) as stream:
        stream.write_table(_table(lines), max_chunksize=2)
    return "a.arrow"


def _write_arrow_file(lines: bytes) -> str:
    with pyarrow.ipc.new_file("b.arrow", _table(lines).schema) as file:
        file.write_table(_table(lines))
    return "b.arrow"


def _write_texts(lines: bytes) -> str:
    Path("texts/below").mkdir(parents=True)
    for number, line in enumerate(lines.splitlines()):
        name = f"texts/below/{number}.md" if number else "texts/0.txt"
        Path(name).write_text(json.loads(line)["text"])
    Path("texts/picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    return "texts"


@pytest.mark.parametrize(
    "write",
    [
        _write_gzip,
        _write_zstandard,
        _write_parquet,
        _write_arrow,
        _write_arrow_file,
        _write_texts,
    ],
)
def test_the_same_records_of_any_kind_of_file_give_the_same_ids(
    write: Callable[[bytes], str], run: Run
) -> None:
    records = [{"text": f"{number} {TEXT}"} for number in range(5)]
    run(write_lines("plain.jsonl", *records))
    run(write(Path("plain.jsonl").read_bytes()), "-o", "other")
    assert tokens_of("other").tolist() == tokens_of("out").tolist()


def test_a_data_set_of_the_hub_is_its_arrow_files(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package that downloads is told the name and the split; here it has them already."""
    import datasets

    records = [{"text": f"{number} {TEXT}"} for number in range(5)]
    run(write_lines("plain.jsonl", *records))
    loaded = datasets.Dataset.from_list(records)
    loaded.save_to_disk(str(tmp_path / "saved"))
    asked = list[tuple[str, str]]()

    def load(name: str, split: str) -> Any:
        asked.append((name, split))
        return datasets.load_from_disk(str(tmp_path / "saved"))

    monkeypatch.setattr(datasets, "load_dataset", load)
    run("hf:some/set:test", "-o", "hub")
    assert asked == [("some/set", "test")]
    assert tokens_of("hub").tolist() == tokens_of("out").tolist()
    run("saved", "-o", "disk")
    assert tokens_of("disk").tolist() == tokens_of("out").tolist()


BAD = {
    "{": "not JSON",
    "[1]": "not an object: each line is one: {…}",
    '{"txt": "a"}': "no field `text`: it has `txt`",
    '{"text": 3}': "`text` is no text: it is a number",
    '{"text": null}': "`text` is no text: it is null",
    '{"text": " \\n"}': "empty document",
}


@pytest.mark.parametrize("line", BAD)
def test_a_broken_record_is_told_with_file_and_line(line: str, run: Run) -> None:
    write_lines("a.jsonl", {"text": "right"}, "", line, {"text": "right"})
    told = run("a.jsonl", status=2)
    assert f"a.jsonl:3: {BAD[line]}" in told
    assert "--skip-bad" in told
    assert not Path("out/index.json").exists()
    assert f"left out: 1 × {BAD[line].partition(':')[0]}" in run("a.jsonl", "--skip-bad")
    assert TokenFolder.read("out").documents == 2


BAD_CHATS = {
    "none": ([], "`messages` is no list of messages: it is a list"),
    "text": ("hello", "`messages` is no list of messages: it is text"),
    "role": ([{"content": "a"}], "`messages` has a message without a role"),
    "silent": ([ASKED], "no turn of the assistant"),
}


@pytest.mark.parametrize("name", BAD_CHATS)
def test_a_broken_conversation_is_told(name: str, run: Run) -> None:
    messages, reason = BAD_CHATS[name]
    write_lines("a.jsonl", {"messages": [ASKED, SAID]}, {"messages": messages})
    assert f"a.jsonl:2: {reason}" in run("a.jsonl", "--chat", "messages", status=2)


def test_bytes_that_are_no_text_and_ids_beyond_the_vocabulary_are_told(run: Run) -> None:
    Path("a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "a.jsonl:2: not UTF-8: byte 10 is 0xff" in run("a.jsonl", status=2)
    write_lines("b.jsonl", {"ids": [1, 70_000]})
    told = run("b.jsonl", "--ids", "ids", status=2)
    assert "b.jsonl:1: an id beyond the vocabulary: 70000, and the tokenizer's largest is" in told


WRONG = {
    ("none.jsonl",): "there is no file or folder `none.jsonl`",
    ("a.csv",): "a.csv is none of the files that are read: `.txt`",
    ("empty",): "empty has no file that is read",
    ("a.jsonl", "--field", "a", "--chat", "b"): "--field and --chat say two things",
    ("a.jsonl", "--prompt", "a"): "--prompt and --answer go together",
    ("a.jsonl", "--last-turn"): "--last-turn is for conversations",
    ("a.jsonl", "--eos", "<none>"): "`<none>` is no token of the tokenizer",
    ("a.jsonl", "--tokenizer", "a.csv", "--eos", "</s>"): "a.csv is no tokenizer.json",
    ("a.jsonl", "--tokenizer", "nowhere"): "there is no `nowhere`",
    ("wrong.gz.jsonl",): "wrong.gz.jsonl is compressed by gzip, not text",
    ("wrong.jsonl.gz",): "wrong.jsonl.gz is not compressed as its name says",
    ("wrong.parquet",): "wrong.parquet is no parquet file",
    ("a.jsonl", "--chat", "m", "--template", "wrong.jinja"): "the template: it is no template",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_command_says_what_is_wrong(words: tuple[str, ...], run: Run) -> None:
    write_lines("a.jsonl", {"text": "a"})
    Path("a.csv").write_text("a,b\n")
    Path("empty").mkdir()
    Path("wrong.gz.jsonl").write_bytes(gzip.compress(b"{}"))
    Path("wrong.jsonl.gz").write_bytes(b"{}")
    Path("wrong.parquet").write_bytes(b"{}")
    Path("wrong.jinja").write_text("{% if %}")
    assert WRONG[words] in run(*words, status=2)


def test_a_folder_is_made_once_and_never_over_another(run: Run) -> None:
    write_lines("a.jsonl", {"text": "one"})
    first = run("a.jsonl")
    before = Path("out/tokens-00000.bin").stat().st_mtime_ns
    assert run("a.jsonl") == first
    assert Path("out/tokens-00000.bin").stat().st_mtime_ns == before
    assert "made with other options" in run("a.jsonl", "--eos", "<end>", status=2)
    write_lines("a.jsonl", {"text": "two"})
    assert "made of other sources" in run("a.jsonl", status=2)


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _start(folder: str, model: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "scalec", "data", "many.jsonl", "-o", folder]
    options = ["--tokenizer", str(model), "--chat", "messages", "--shard-bytes", "40000", *words]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)


def test_bytes_do_not_depend_on_workers_or_on_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    chats = [[ASKED, {**SAID, "content": f"{TEXT} {number}"}] for number in range(1500)]
    write_lines("many.jsonl", *({"messages": chat} for chat in chats))
    for folder, workers in (("one", "1"), ("three", "3")):
        assert _start(folder, model, "--workers", workers).wait(120) == 0
    killed = _start("killed", model, "--workers", "1")
    while len([*Path().glob("killed/shard-*.json")]) < 4:
        assert killed.poll() is None, "the run ended before it was killed"
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not Path("killed/index.json").exists()
    notes = {path: path.stat().st_mtime_ns for path in Path("killed").glob("tokens-*.bin")}
    assert _start("killed", model, "--workers", "2").wait(120) == 0
    kept = [path for path, changed in notes.items() if path.stat().st_mtime_ns == changed]
    assert len(kept) >= 4
    assert _bytes_of(Path("one")) == _bytes_of(Path("three")) == _bytes_of(Path("killed"))
    assert len(TokenFolder.read("one").shards) > 6


def test_a_shard_that_is_damaged_before_the_end_is_made_anew(run: Run, model: Path) -> None:
    write_lines("a.jsonl", *({"text": f"{number} {TEXT}"} for number in range(40)))
    bad = Path("a.jsonl").read_text() + "{\n"
    Path("bad.jsonl").write_text(bad)
    options = ("bad.jsonl", "--shard-bytes", "4000")
    run(*options, status=2)
    assert [*Path("out").glob("shard-*.json")]
    whole = Path("out/tokens-00000.bin").read_bytes()
    Path("out/tokens-00000.bin").write_bytes(b"\0" * len(whole))
    run(*options, status=2)
    assert Path("out/tokens-00000.bin").read_bytes() == whole


@given(lines=st.lists(st.integers(0, 40), min_size=1, max_size=30), size=st.integers(8, 400))
def test_stretches_have_each_line_once_whatever_their_size(
    lines: list[int], size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    records = [
        json.dumps({"n": number, "text": "x" * length}) for number, length in enumerate(lines)
    ]
    path.write_text("\n".join(records))
    numbers, places = list[int](), list[str]()
    for record in _records(path, size):
        assert isinstance(record.value, dict)
        numbers.append(record.value["n"])
        places.append(str(record.place))
    assert numbers == [*range(len(lines))]
    assert places == [f"{path}:{number + 1}" for number in numbers]


def _records(path: Path, size: int) -> Iterator[Record]:
    for stretch in make_stretches([str(path)], size):
        for part in stretch.parts:
            for record in read_records(part, ()):
                assert not isinstance(record, BadRecord)
                yield record


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is no JSON"),
        ("[]", "is not the index of a folder"),
        ('{"format": 9, "shards": []}', "has format 9, and this scalec reads 1"),
        ('{"format": 1, "shards": []}', "lacks entries of an index"),
    ],
)
def test_an_index_that_is_none_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(TokenFolderError, match=reason):
        TokenFolder.read(tmp_path)
