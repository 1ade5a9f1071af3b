"""Pages in a real browser, where there is one: nothing leaves its place, no words cover others, all
looks as before.

`SCALEC_BROWSER` names a Chromium that is not on the path.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

from scalec.tools.report import report
from scalec.tools.report.command import subject

ROOT = Path(__file__).parents[3]
BROWSER = os.environ.get("SCALEC_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PAGES = ("tiny_llama", "tiny_pipeline", "llama3_70b")
WIDTHS = {"laptop": 1280, "paper": 1047}
SCHEMES = {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}

LOOK = """<script>
const found = { wide: document.documentElement.scrollWidth, left: [], over: [] };
for (const svg of document.querySelectorAll("svg.drawing")) {
  const view = svg.viewBox.baseVal, words = [...svg.querySelectorAll("text")];
  const boxes = words.map(word => word.getBBox());
  words.forEach((word, at) => {
    const box = boxes[at];
    if (box.x < view.x - 1 || box.x + box.width > view.x + view.width + 1) found.left.push(word.textContent);
    boxes.slice(at + 1).forEach((other, more) => {
      const wide = Math.min(box.x + box.width, other.x + other.width) - Math.max(box.x, other.x);
      const high = Math.min(box.y + box.height, other.y + other.height) - Math.max(box.y, other.y);
      if (wide > 2 && high > 4) found.over.push([word.textContent, words[at + 1 + more].textContent]);
    });
  });
}
document.body.dataset.found = JSON.stringify(found);
</script></body>"""

pytestmark = [
    pytest.mark.skipif(not BROWSER, reason="there is no browser: chromium is not on the path"),
    pytest.mark.long,
]


def page(name: str) -> str:
    return report(subject(ROOT / "plans" / f"{name}.scale", proved=False)).replace(str(ROOT), "")


def browse(path: Path, *options: str) -> str:
    common = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={path.parent}/user",
    )
    line = [BROWSER, *common, *options, path.as_uri()]
    return subprocess.run(line, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_everything_is_in_its_place(name: str, size: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(name).replace("</body>", LOOK), encoding="utf-8")
    dom = browse(path, f"--window-size={WIDTHS[size]},2000", "--dump-dom")
    (text,) = re.findall(r'data-found="([^"]*)"', dom)
    found = json.loads(
        text.replace("&quot;", '"').replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&")
    )
    assert found["wide"] <= WIDTHS[size]
    assert found["left"] == []
    assert found["over"] == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", PAGES)
def test_pictures_look_as_before(
    name: str, scheme: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By the brightness of squares of 20 pixels, from 0 to 9: fonts differ a little from one
    machine to another.
    """
    path, golden = (
        tmp_path / "page.html",
        ROOT / "tests" / "golden" / "report" / f"{name}.{scheme}.txt",
    )
    path.write_text(page(name), encoding="utf-8")
    browse(
        path, *SCHEMES[scheme], "--window-size=1280,2000", f"--screenshot={tmp_path / 'shot.png'}"
    )
    rows = ["".join(map(str, row)) for row in coarse(tmp_path / "shot.png")]
    if request.config.getoption("--update-golden"):
        golden.write_text("\n".join(rows) + "\n")
    before = golden.read_text().split()
    assert [len(row) for row in rows] == [len(row) for row in before]
    pairs = [
        abs(int(a) - int(b))
        for one, other in zip(rows, before, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    assert np.mean(np.array(pairs) > 1) < 0.02


def coarse(path: Path, square: int = 20) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """The brightness of a PNG with 8 bits a channel, by squares."""
    pixels = decoded(path.read_bytes())[..., :3].mean(axis=2)
    rows, columns = (size // square for size in pixels.shape)
    squares = pixels[: rows * square, : columns * square].reshape(rows, square, columns, square)
    return np.rint(squares.mean(axis=(1, 3)) / 255 * 9).astype(np.int64)


def decoded(png: bytes) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]":
    """Rows, columns and channels, by section 9 of the PNG specification."""
    at, data, width, height, channels = 8, b"", 0, 0, 0
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        part = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height, depth, colours = struct.unpack(">IIBB", part[:10])
            channels = {2: 3, 6: 4}[colours]
            assert depth == 8
        data += part if kind == b"IDAT" else b""
        at += size + 12
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, width * channels + 1)
    above, found = (
        np.zeros((width, channels), np.uint8),
        np.zeros((height, width, channels), np.uint8),
    )
    for row, line in enumerate(lines):
        above = found[row] = unfiltered(int(line[0]), line[1:].reshape(width, channels), above)
    return found


def unfiltered(
    kind: int,
    line: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]",
    above: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]",
) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    if kind == 0:
        return line
    if kind == 1:
        return np.cumsum(line, axis=0, dtype=np.uint8)
    if kind == 2:
        return line + above
    made, left, corner = (
        line.astype(np.int64),
        np.zeros(line.shape[1], np.int64),
        np.zeros(line.shape[1], np.int64),
    )
    for x, up in enumerate(above.astype(np.int64)):
        guess = left + up - corner
        far = np.abs(guess - np.array([left, up, corner]))
        paeth = np.where(
            (far[0] <= far[1]) & (far[0] <= far[2]), left, np.where(far[1] <= far[2], up, corner)
        )
        left = made[x] = (made[x] + ((left + up) // 2 if kind == 3 else paeth)) % 256
        corner = up
    return made.astype(np.uint8)
