"""Writing of output: whole files or none, and nothing that scalec did not write."""

import errno
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from scalec.compiler.emit.write_files import OutputError, write

PROGRAM = '"""tiny on 1 rank.  Written by scalec 0.1.0."""\n'
ACCOUNT = '{"written_by": "scalec 0.1.0", "ranks": 1}\n'
FILES = {"train.py": PROGRAM, "plan.json": ACCOUNT}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def refusal(folder: Path, files: dict[str, str] = FILES) -> str:
    with pytest.raises(OutputError) as error:
        write(folder, files)
    return str(error.value)


def test_writes_into_a_new_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", FILES)
    assert contents(tmp_path / "a" / "b") == FILES


def test_replaces_what_scalec_wrote(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    newer = {name: text.replace("0.1.0", "0.2.0") for name, text in FILES.items()}
    write(tmp_path, newer)
    assert contents(tmp_path) == newer


def test_what_says_the_same_is_not_written_again(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    before = _written(tmp_path)
    write(tmp_path, FILES)
    assert _written(tmp_path) == before


def _written(folder: Path) -> dict[Path, tuple[int, int]]:
    """Each file itself, and when it was written; reading it changes neither."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_new_files_have_ordinary_permissions(tmp_path: Path) -> None:
    write(tmp_path / "out", FILES)
    (tmp_path / "other").touch()
    assert (tmp_path / "out" / "train.py").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "print('mine')\n"),
        ("train.py", ""),
        ("train.py", "#\n" * 1000 + PROGRAM),
        ("plan.json", '{"plan": 1}'),
        ("plan.json", '{"written_by": "me"}'),
        ("plan.json", '["written_by", "scalec 0.1.0"]'),
        ("plan.json", "[" * 100_000),
        ("plan.json", "written_by: scalec 0.1.0"),
    ],
)
def test_refuses_a_file_of_someone_else(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert (
        refusal(tmp_path)
        == f"`{tmp_path / name}` was not written by scalec: move it away, or choose another"
        " folder with -o"
    )
    assert contents(tmp_path) == {name: text}


def test_refuses_bytes_that_are_not_text(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes(b"\xff\xfe")
        assert "was not written by scalec" in refusal(tmp_path, {name: ""})


def test_refuses_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").mkdir()
    assert "was not written by scalec" in refusal(tmp_path)


ROWS = "0F0,0B0\n"
PIPELINE = {
    "schedule.csv": ROWS,
    "train.py": f"{PROGRAM}sha256 = '{sha256(ROWS.encode()).hexdigest()}'\n",
}


def test_rows_are_known_by_the_program_beside_them(tmp_path: Path) -> None:
    write(tmp_path, PIPELINE)
    newer = {"schedule.csv": "0F0,0F1,0B0,0B1\n", "train.py": PROGRAM}
    write(tmp_path, newer)
    assert contents(tmp_path) == newer
    refused = f"`{tmp_path / 'schedule.csv'}` was not written by scalec"
    assert refusal(tmp_path, PIPELINE).startswith(refused)
    (tmp_path / "train.py").unlink()
    assert refusal(tmp_path, PIPELINE).startswith(refused)
    write(tmp_path, newer)


def test_files_that_the_program_no_longer_reads_are_removed(tmp_path: Path) -> None:
    rows, names = "0F0\n", '{"written_by": "scalec 1"}'
    known = " ".join(sha256(text.encode()).hexdigest() for text in (rows, names))
    write(
        tmp_path, {"train.py": f"{PROGRAM}# {known}\n", "schedule.csv": rows, "names.json": names}
    )
    (tmp_path / "of_a_user.csv").write_text("1,2\n")
    (tmp_path / "folder.csv").mkdir()
    write(tmp_path, {"train.py": PROGRAM})
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "of_a_user.csv", "folder.csv"}


@pytest.mark.parametrize("target", ["elsewhere.py", "missing.py"])
def test_refuses_a_file_that_is_a_symbolic_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere.py").write_text(PROGRAM)
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "train.py").symlink_to(tmp_path / target)
    assert "is a symbolic link: remove it" in refusal(folder)
    assert list(folder.iterdir()) == [folder / "train.py"]
    assert not (tmp_path / "missing.py").exists()


@pytest.mark.parametrize("target", ["elsewhere", "missing"])
def test_refuses_a_folder_that_is_a_symbolic_link(tmp_path: Path, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / target)
    assert "is a symbolic link: name the folder" in refusal(tmp_path / "out")
    assert contents(tmp_path / "elsewhere") == {}


def test_refuses_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "is not a folder" in refusal(tmp_path / "out")
    assert "not a directory; choose another folder" in refusal(tmp_path / "out" / "deeper")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_refuses_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert (
        refusal(tmp_path)
        == f"cannot write `{tmp_path}`: permission denied; choose another folder with -o"
    )


def failing(error: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    return fail


def test_a_failure_on_the_way_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, FILES)
    monkeypatch.setattr(Path, "replace", failing(errno.EROFS))
    newer = {"train.py": PROGRAM + "pass\n"}
    assert (
        refusal(tmp_path, newer)
        == f"cannot write `{tmp_path}`: read-only file system; choose another folder with -o"
    )
    assert contents(tmp_path) == FILES


def test_files_that_the_account_has_the_hash_of_are_replaced_and_removed(tmp_path: Path) -> None:
    """As the files of programs of torch alone, which know no hashes themselves."""
    library, rows = "# Written by scalec\n", "0F0,0B0\n"
    hashes = ", ".join(f'"{sha256(text.encode()).hexdigest()}"' for text in (library, rows))
    account = f'{{"written_by": "scalec 0.1.0", "files": [{hashes}]}}\n'
    beside = {"torch_ops.py": library, "schedule.csv": rows}
    write(tmp_path, FILES | beside | {"plan.json": account})
    newer = FILES | beside | {"schedule.csv": "0F0,0F1\n", "plan.json": account}
    write(tmp_path, newer)
    assert contents(tmp_path) == newer
    write(tmp_path, FILES | {"schedule.csv": "0F0,0F1\n", "plan.json": account})
    assert "torch_ops.py" not in contents(tmp_path)


def test_a_library_that_somebody_changed_stays(tmp_path: Path) -> None:
    account = f'{{"written_by": "scalec 0.1.0", "files": ["{sha256(b"x").hexdigest()}"]}}\n'
    write(tmp_path, FILES | {"torch_ops.py": "x", "plan.json": account})
    (tmp_path / "torch_ops.py").write_text("x = 1\n")
    write(tmp_path, FILES)
    assert contents(tmp_path) == FILES | {"torch_ops.py": "x = 1\n"}
