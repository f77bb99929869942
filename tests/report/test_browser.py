"""The page in a browser: its script runs under its own policy, shows numbers, zooms and changes the scale. Skipped
where no chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from shoal.report.page import write_report
from tests.report.synthetic import write_run

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium, which is not on the PATH (Debian: apt-get install chromium)"
)
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=960,2000", "--dump-dom"),
]

ACTIONS = """
const seen = {};
const figure = document.querySelector("figure.hero"), place = figure.querySelector(".wide");
const act = (kind, x, y, target = place) => {
  const box = place.getBoundingClientRect();
  const clientX = box.left + x * box.width, clientY = box.top + y * box.height;
  target.dispatchEvent(new PointerEvent(kind, { clientX, clientY, bubbles: true }));
};
const drawn = () => place.querySelector("svg.drawn");
const labels = () => [...drawn().querySelectorAll("text")].map((each) => each.textContent);
act("pointermove", 0.5, 0.5);
seen.hover = place.querySelector("output").textContent;
act("pointerdown", 0.4, 0.5); act("pointermove", 0.5, 0.5); act("pointerup", 0.6, 0.5, window);
seen.zoomed = labels();
act("pointermove", 0.5, 0.5);
seen.hoverZoomed = place.querySelector("output").textContent;
const [log, whole] = figure.querySelectorAll("button");
whole.click();
seen.whole = drawn() === null && place.querySelector("svg").style.display === "";
log.click();
seen.log = labels();
const rows = document.querySelector("figure[data-bars] .wide"), box = rows.getBoundingClientRect();
rows.dispatchEvent(new PointerEvent("pointermove", {
  clientX: box.left + 0.25 * box.width, clientY: box.top + 0.1 * box.height,
}));
seen.bar = rows.querySelector("output").textContent;
document.body.dataset.seen = JSON.stringify(seen);
"""


def dom(page: Path, profile: Path) -> str:
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", steps=200))
    html = page.read_text(encoding="utf-8")
    assert ">log</button>" not in html and ">log</button>" in dom(page, tmp_path / "profile"), (
        "its policy lets its own script run"
    )

    acted = tmp_path / "acted.html"
    acted.write_text(
        html.replace("Content-Security-Policy", "none").replace("</body>", f"<script>{ACTIONS}</script></body>")
    )
    found = re.search(r'data-seen="([^"]*)"', dom(acted, tmp_path / "profile"))
    assert found is not None, "the actions failed"
    seen = json.loads(unescape(found[1]))
    step = int(re.match(r"step (\d+)\n", seen["hover"])[1])  # type: ignore[index]
    assert (
        80 < step < 130
        and "\ntraining, smoothed 2." in seen["hover"]
        and "\nvalidation 2." in seen["hover"]
        and "(step 100)" in seen["hover"]
    )
    steps = [
        int(text.removeprefix("step "))
        for text in seen["zoomed"]
        if text.startswith("step ") or (text.isdecimal() and int(text) > 9)
    ]
    assert len(steps) > 1 and min(steps) > 70 and max(steps) < 150, "the stretch that was dragged over"
    assert re.match(r"step \d+\n", seen["hoverZoomed"])
    assert seen["whole"] is True
    assert {"2", "5"} <= set(seen["log"])
    assert re.match(r"(for|back)ward \d, rank 0: [13]\d(\.\d+)? ms$", seen["bar"])
    refused = tmp_path / "refused.html"
    refused.write_text(html.replace('"use strict";', '"use strict"; '))
    assert ">log</button>" not in dom(refused, tmp_path / "profile"), "and no other"
