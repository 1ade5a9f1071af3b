"""Files to batches: what is held out, the order of windows, and that the ranks share out the
rows.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.forked_ranks import run_ranks
from scalec.runtime import Batch, Input, Loader, Mesh, Positions, RunError
from scalec.runtime.data.files import find_files, split_files
from scalec.runtime.data.mixture import Mixture, Part, Stream
from scalec.runtime.data.order import permute
from scalec.runtime.data.samples import Windows

SEQ, BATCH = 4, 8
PLAIN = Windows()


@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_the_shuffle_is_a_permutation(windows: int, key: int) -> None:
    assert sorted(permute(position, windows, key) for position in range(windows)) == list(
        range(windows)
    )


def test_the_shuffle_depends_on_its_key() -> None:
    orders = {tuple(permute(position, 50, key) for position in range(50)) for key in range(20)}
    assert len(orders) == 20
    assert tuple(range(50)) not in orders


def _alone(stream: Stream) -> Mixture:
    return Mixture([Part("", stream)])


def _write(folder: Path, sizes: list[int]) -> list[str]:
    """Files whose bytes count up through all of them."""
    start, files = 0, []
    for number, size in enumerate(sizes):
        path = folder / f"{number}.bin"
        path.write_bytes(bytes((start + i) % 256 for i in range(size)))
        start += size
        files.append(str(path))
    return files


def test_windows_run_across_files(tmp_path: Path) -> None:
    stream = Stream(_write(tmp_path, [3, 1, 1, 12, 4]), torch.uint8, SEQ + 1)
    windows = [stream.window(number).tolist() for number in range(stream.windows)]
    assert windows == [list(range(5 * number, 5 * number + 5)) for number in range(4)]


def test_tokens_of_two_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"".join(number.to_bytes(2, "little") for number in (1, 50256, 65535, 7, 0)))
    assert Stream([str(path)], torch.uint16, SEQ + 1).window(0).tolist() == [1, 50256, 65535, 7, 0]


def test_a_file_that_ends_within_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(1001))
    message = f"{path} has 1,001 bytes, which are no whole number of tokens: one of uint16 has 2"
    with pytest.raises(RunError, match=f"^{re.escape(message)}$"):
        Stream([str(path)], torch.uint16, SEQ + 1)
    assert Stream([str(path)], torch.uint8, SEQ + 1).tokens == 1001


def _batches(
    files: list[str], split: dict[str, tuple[str, ...]], microbatches: int, steps: int
) -> list[Batch]:
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Input(("seq", "batch"), split)
    stream = Stream(files, torch.uint8, SEQ + 1)
    loader = Loader(
        _alone(stream),
        PLAIN,
        {"tokens": layout, "labels": layout},
        mesh,
        BATCH,
        microbatches,
        256,
        seed=0,
    )
    return [loader.batch(step) for step in range(steps)]


def test_ranks_share_out_the_rows_and_each_pass_reads_every_window_once(tmp_path: Path) -> None:
    files = _write(tmp_path, [(SEQ + 1) * 16])
    ranks = run_ranks(4, _batches, files, {"batch": ("dp",)}, 2, 4)
    assert torch.equal(ranks[0][0].tokens, ranks[1][0].tokens)  # tp ranks read the same
    assert ranks[0][0].tokens.shape == (2, SEQ, BATCH // 4)
    assert torch.equal(ranks[0][0].tokens + 1, ranks[0][0].labels)
    starts = [
        [int(row[0]) for dp in (0, 2) for m in ranks[dp][step].tokens for row in m.unbind(1)]
        for step in range(4)
    ]
    passes = starts[0] + starts[1], starts[2] + starts[3]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(0, 80, SEQ + 1))
    assert passes[0] != passes[1]


def test_a_step_holds_the_same_rows_on_any_mesh(tmp_path: Path) -> None:
    files = _write(tmp_path, [(SEQ + 1) * 16])
    layout = Input(("batch", "seq"), {})
    stream = Stream(files, torch.uint8, SEQ + 1)
    alone = Loader(
        _alone(stream), PLAIN, {"tokens": layout, "labels": layout}, Mesh({}), BATCH, 2, 256, seed=0
    ).batch(0)
    ranks = run_ranks(4, _batches, files, {"batch": ("dp",), "seq": ("tp",)}, 2, 1)
    blocks = [rank[0].tokens.transpose(1, 2) for rank in ranks]
    halves = [torch.cat([blocks[dp], blocks[dp + 1]], dim=2) for dp in (0, 2)]
    assert torch.equal(torch.cat(halves, dim=1), alone.tokens)
    assert [tokens.shape for tokens, _ in alone.microbatches()] == [(BATCH // 2, SEQ)] * 2


def _parts(
    files: list[str], split: tuple[str, ...], zigzag: tuple[str, ...]
) -> tuple[list[list[int]], Any]:
    """This rank's tokens of the first step, and what its `Positions` say."""
    mesh = Mesh({"cp": 2, "tp": 2})
    layout = Input(("seq", "batch"), {"seq": split}, zigzag)
    loader = Loader(
        _alone(Stream(files, torch.uint8, 17)),
        PLAIN,
        {"tokens": layout, "labels": layout},
        mesh,
        2,
        1,
        256,
        0,
    )
    return loader.batch(0).tokens[0].T.tolist(), Positions(mesh, 16, *split, zigzag=zigzag).chunks


@pytest.mark.parametrize(
    ("split", "first"), [(("cp", "tp"), [0, 1, 2, 3]), (("tp", "cp"), [0, 1, 6, 7])]
)
def test_a_sequence_is_cut_by_nested_axes(
    split: tuple[str, ...], first: list[int], tmp_path: Path
) -> None:
    """The first axis is the outermost, and cp a zigzag."""
    layout = Input(("seq", "batch"), {})
    stream = Stream(files := _write(tmp_path, [17 * 4]), torch.uint8, 17)
    alone = Loader(
        _alone(stream), PLAIN, {"tokens": layout, "labels": layout}, Mesh({}), 2, 1, 256, seed=0
    ).batch(0)
    rows = alone.tokens[0].T
    ranks = run_ranks(4, _parts, files, split, ("cp",))
    held = [
        [at for start, length in chunks for at in range(start, start + length)]
        for _, chunks in ranks
    ]
    assert held[0] == first
    for (tokens, _), mine in zip(ranks, held, strict=True):
        assert tokens == rows[:, mine].tolist()
    assert sorted(at for mine in held for at in mine) == list(range(16))


def test_some_files_are_held_out_and_moving_them_changes_nothing() -> None:
    files = [f"/a/{number}.txt" for number in range(40)]
    training, held = split_files(files, 0.1)
    assert len(held) == 4
    assert sorted(training + held) == sorted(files)
    moved = split_files([path.replace("/a/", "/b/c/") for path in files], 0.1)[1]
    assert [Path(path).name for path in moved] == [Path(path).name for path in held]
    assert len(split_files(files[:2], 0.01)[1]) == 1
    assert split_files(files[:1], 0.5) == (files[:1], [])


def test_what_is_wrong_with_data_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(RunError, match="no file that holds anything"):
        find_files((str(tmp_path / "*.txt"),))
    with pytest.raises(RunError, match=rf"it is a folder: `{tmp_path}/\*` are the files in it"):
        find_files((str(tmp_path),))
    with pytest.raises(RunError, match=r"3 tokens in 1 file"):
        Stream(_write(tmp_path, [3]), torch.uint8, SEQ + 1)
    layout = Input(("seq", "batch"), {})
    stream = Stream(_write(tmp_path, [100]), torch.uint8, SEQ + 1)
    with pytest.raises(RunError, match="vocab is 50"):
        Loader(
            _alone(stream), PLAIN, {"tokens": layout, "labels": layout}, Mesh({}), 20, 1, 50, seed=0
        ).batch(0)


def test_the_standard_library_is_a_corpus() -> None:
    files = find_files(("python_stdlib",))
    assert len(files) > 300
    assert any(path.endswith("/argparse.py") for path in files)
    assert not any("site-packages" in path or "/test/" in path for path in files)
