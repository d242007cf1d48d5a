"""Pages in headless Chromium, for tests that look at what a person would see."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
OPTIONS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--virtual-time-budget=2000"),
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")


def dom_of(page: str) -> str:
    """The document as the browser holds it after loading `page` from disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(page, encoding="utf-8")
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        done = subprocess.run(
            [CHROMIUM, *OPTIONS, *sandbox, f"--user-data-dir={folder}/profile", "--dump-dom", file.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    return done.stdout
