"""Code of attrs' methods that is kept: classes are as ever, and a second process compiles none
of it.
"""

import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalec.compiler.cli.attrs_code import KeptCode

PROGRAM = """
import builtins, sys

counts = {"attrs": 0}
usual = builtins.compile

def counted(text, filename, *rest, **named):
    counts["attrs"] += str(filename).startswith("<attrs generated methods scalec")
    return usual(text, filename, *rest, **named)

builtins.compile = counted
from scalec.compiler.cli import main
status = main(["check", sys.argv[1]])
from scalec.compiler.ir.types import Placement, Type, sharded
a, b = (Type("f32", ("batch",), (("dp", sharded("batch")),)) for _ in range(2))
assert a == b and hash(a) == hash(b) and a != Type("f32", ("batch",)), (a, b)
assert "batch" in repr(a)
print(status, counts["attrs"])
"""
PLAN = Path(__file__).parents[2] / "plans" / "tiny_llama.scale"


def compiled_texts(folder: Path) -> int:
    """How many texts of attrs' a process compiles whose user's cache is in `folder`."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-c", PROGRAM, str(PLAN)]
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    status, count = map(int, ended.stdout.splitlines()[-1].split())
    assert status == 0
    return count


def code_file(folder: Path) -> Path:
    (path,) = (folder / "scalec").glob("attrs-*.marshal")
    return path


def test_a_second_process_compiles_none(tmp_path: Path) -> None:
    assert compiled_texts(tmp_path) > 50
    assert compiled_texts(tmp_path) == 0


@pytest.mark.parametrize("content", [b"", b"{", marshal.dumps(7), marshal.dumps([1, 2])], ids=str)
def test_a_damaged_file_is_written_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "scalec").mkdir(mode=0o700)
    path = tmp_path / "code.marshal"
    path.write_bytes(content)
    codes = KeptCode(path)
    codes.compile("1 + 1", "<text>", "eval")
    codes.save()
    assert eval(marshal.loads(path.read_bytes())["1 + 1", "<text>"]) == 2


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    compiled_texts(tmp_path)
    (tmp_path / "scalec").chmod(0o777)
    assert compiled_texts(tmp_path) > 50


def test_other_text_is_other_code(tmp_path: Path) -> None:
    """But for the salt of hashes, which differs between processes."""
    codes = KeptCode(tmp_path / "code.marshal")
    one, two = (codes.compile(f"lambda: {number}", "<text>", "eval") for number in (1, 2))
    assert (eval(one)(), eval(two)()) == (1, 2)
    salted = [
        codes.compile(f"lambda self: hash((\n        {salt},\n self,))", "<text>", "eval")
        for salt in (3, -4)
    ]
    assert salted[0] is salted[1]


def test_what_is_no_longer_used_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalec.compiler.cli.attrs_code.MOST", 2)
    path = tmp_path / "code.marshal"
    for texts in (["1", "2"], ["3"]):
        codes = KeptCode(path)
        for text in texts:
            codes.compile(text, "<text>", "eval")
        codes.save()
    assert [text for text, _ in marshal.loads(path.read_bytes())] == ["3"]
