"""The files beside a program: read from any folder, and refused where it is missing or another."""

from hashlib import sha256
from pathlib import Path

import pytest

from scalec.runtime import Account, Expected, Prediction, read_predictions, read_schedule

ROWS = "0F0,0SEND_F0\n1RECV_F0,1F0\n"
HASH = sha256(ROWS.encode()).hexdigest()


def test_rows_are_read_beside_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "schedule.csv").write_text(ROWS)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_schedule("schedule.csv", str(tmp_path / "train.py"), HASH) == (
        "0F0,0SEND_F0",
        "1RECV_F0,1F0",
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "is missing: copy it from where the plan was compiled, or compile the plan again"),
        (
            ROWS[:-1],
            "is not the one that train.py was compiled with: remove it and compile the plan again",
        ),
        (
            "",
            "is not the one that train.py was compiled with: remove it and compile the plan again",
        ),
    ],
)
def test_another_schedule_is_refused(
    text: str | None,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if text is not None:
        (tmp_path / "schedule.csv").write_text(text)
    with pytest.raises(SystemExit) as ended:
        read_schedule("schedule.csv", str(tmp_path / "train.py"), HASH)
    assert (ended.value.code, capsys.readouterr().err) == (
        2,
        f"error: {tmp_path / 'schedule.csv'} {why}\n",
    )


PREDICTIONS = """{"written_by": "scalec", "predictions": [
 {"mesh": {"pp": 2, "dp": 2},
  "account": {"device": "cuda", "ranks": [7, 5], "reserve": 3, "axis": "pp", "most": [9, 6]},
  "expected": {"gpu": "h100_sxm", "seconds": 0.5, "error": 0.2, "flops_per_token": 12,
               "peak_flops": 989e12}},
 {"mesh": {"pp": 2, "dp": 1}, "account": {"device": "cuda", "ranks": [8, 6]}}
]}"""


def test_predictions_are_read_for_each_mesh(tmp_path: Path) -> None:
    (tmp_path / "predictions.json").write_text(PREDICTIONS)
    hashed = sha256(PREDICTIONS.encode()).hexdigest()
    assert read_predictions("predictions.json", str(tmp_path / "train.py"), hashed) == (
        Prediction(
            {"pp": 2, "dp": 2},
            Account("cuda", (7, 5), reserve=3, axis="pp", most=(9, 6)),
            Expected("h100_sxm", 0.5, error=0.2, flops_per_token=12, peak_flops=989e12),
        ),
        Prediction({"pp": 2, "dp": 1}, Account("cuda", (8, 6))),
    )
