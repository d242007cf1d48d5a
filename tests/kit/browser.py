"""Pages in headless Chromium, for tests that look at what a person would see."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
OPTIONS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--virtual-time-budget=2000"),
)
ATTEMPT_TIMEOUT_S = 60.0
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")


def dom_of(page: str) -> str:
    """The document as the browser holds it after loading `page` from disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        return dom_at(file.as_uri())


def dom_at(address: str, *options: str, attempts: int = 3) -> str:
    """The document that the browser holds after opening an address."""
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *OPTIONS, *options, *sandbox, f"--user-data-dir={profile}", "--dump-dom", address]
        dom = Path(profile, "dom.html")  # a pipe would be waited for until the browser's helpers have ended, too
        try:
            with dom.open("wb") as stream:
                subprocess.run(command, stdout=stream, timeout=ATTEMPT_TIMEOUT_S, check=True)
            return dom.read_text(encoding="utf-8")
        except subprocess.TimeoutExpired:  # once in a while a browser does not start, whatever the page
            if attempts == 1:
                raise
    return dom_at(address, *options, attempts=attempts - 1)


def in_frame(page: str, script: str, *, width_px: int) -> Any:
    """What the body of a JavaScript function returns, as JSON, with `view`, the window of `page` at that width."""
    outer = f"""<!doctype html><pre id="found"></pre>
<iframe id="frame" style="width:{width_px}px;height:900px;border:0"></iframe>
<script>const frame = document.getElementById("frame");
const answer = view => {{ {script} }};
frame.onload = () => {{ let found;
try {{ found = answer(frame.contentWindow); }} catch (error) {{ found = String(error); }}
document.getElementById("found").textContent = JSON.stringify(found); }};
frame.src = "page.html";</script>"""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in (("page.html", page), ("outer.html", outer)):
            Path(folder, name).write_text(content, encoding="utf-8")
        dom = dom_at(Path(folder, "outer.html").as_uri(), "--allow-file-access-from-files")
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    return json.loads(unescape(found[1]))
