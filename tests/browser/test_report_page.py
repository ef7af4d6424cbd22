"""The report in a real browser: nothing is asked of a network, nothing is complained of, no label hides another."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main
from tests.report_runs import EVIL, small_job, write_plan, write_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: as root `apt-get install chromium`; .ci/run does that where it can"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
    "--virtual-time-budget=2000", "--dump-dom",
)  # fmt: skip

LABELS = """
const wrong = [];
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const labels = [...svg.querySelectorAll("text")].map(one => [one.textContent, one.getBoundingClientRect()]);
  labels.forEach(([words, box], index) => {
    if (box.left < frame.left - 1 || box.right > frame.right + 1
        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
      wrong.push(`${words} leaves its picture`);
    for (const [other, second] of labels.slice(index + 1))
      if (Math.min(box.right, second.right) - Math.max(box.left, second.left) > 1
          && Math.min(box.bottom, second.bottom) - Math.max(box.top, second.top) > 3)
        wrong.push(`${words} over ${other}`);
  });
}
document.documentElement.setAttribute("data-wrong", JSON.stringify(wrong));
document.documentElement.setAttribute("data-wide", document.documentElement.scrollWidth > innerWidth);
"""
"""Looks for labels that hide each other or leave their picture, and for a page wider than the window."""

Browse = Callable[..., tuple[str, str, str]]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a file; returns the page as it stands afterwards, what the browser logged, and its network log."""

    def open_page(page: Path, *flags: str) -> tuple[str, str, str]:
        assert CHROMIUM is not None
        profile, network = tmp_path / "profile", tmp_path / "network.json"
        shutil.rmtree(profile, ignore_errors=True)
        words = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", f"--log-net-log={network}", *flags, page.as_uri()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, done.stderr, network.read_text("utf-8", errors="replace")

    return open_page


def run_page(folder: Path, name: str = "small") -> Path:
    """A report with every section."""
    run = write_run(folder / "run", small_job(name=name))
    write_plan(run / "plan.json", small_job(name=name))
    with pytest.raises(SystemExit) as end:
        main(["report", str(run)])
    assert end.value.code == 0
    return run / "report.html"


def plan_page(folder: Path) -> Path:
    """A report on a plan of two nodes."""
    path = write_plan(folder / "plan.json", small_job("dp=2 pp=4"), "2x8 A100-SXM4-80GB")
    with pytest.raises(SystemExit) as end:
        main(["report", str(path)])
    assert end.value.code == 0
    return path.with_suffix(".html")


def requested(network: str) -> set[str]:
    """The addresses that the network log names, but for those of the browser itself, which looks for its maker."""
    found = re.findall(r'"url":"((?:https?|wss?|ftp)://([^/"]*)[^"]*)"', network)
    return {address for address, host in found if not host.endswith((".google.com", ".googleapis.com"))}


@pytest.mark.parametrize("page", [run_page, plan_page])
def test_it_opens_without_a_request_or_a_complaint(
    page: Callable[[Path], Path], tmp_path: Path, browse: Browse
) -> None:
    dom, log, network = browse(page(tmp_path))
    assert dom.count("<svg") >= 4 and "</html>" in dom
    assert "CONSOLE" not in log
    assert requested(network) == set()


def test_a_request_would_be_seen(tmp_path: Path, browse: Browse) -> None:
    page = tmp_path / "page.html"
    page.write_text("<img src='http://example.invalid/x.png'><script>console.error('seen')</script>")
    _, log, network = browse(page)
    assert requested(network) == {"http://example.invalid/x.png"} and "CONSOLE" in log


def test_names_do_not_run(tmp_path: Path, browse: Browse) -> None:
    path = run_page(tmp_path, EVIL)
    # Without the policy that forbids all scripts: it is escaping that must keep names from running.
    text = path.read_text("utf-8")
    path.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", text), "utf-8")
    dom, log, _ = browse(path)
    assert "<title>Run run</title>" in dom and "CONSOLE" not in log


@pytest.mark.parametrize(("page", "width"), [(run_page, 420), (plan_page, 1100)])
def test_labels_do_not_hide_each_other(
    page: Callable[[Path], Path], width: int, tmp_path: Path, browse: Browse
) -> None:
    path = page(tmp_path)
    text = re.sub(r"<meta http-equiv=[^>]*>", "", path.read_text("utf-8"))
    path.write_text(text.replace("</body>", f"<script>{LABELS}</script></body>"), "utf-8")
    dom, _, _ = browse(path, f"--window-size={width},900")
    found = re.search(r'data-wrong="([^"]*)"', dom)
    assert found is not None
    assert json.loads(found.group(1).replace("&quot;", '"')) == []
    assert 'data-wide="false"' in dom
