"""Make the pictures of the README and the pages from a real campaign of the built-in tiny model: `nox -s pictures`.

One run is drawn by the live display as a terminal shows it (SVG, rich's own export); the report page of the campaign
and the credit heat map of one of its runs are photographed in headless Chromium (PNG).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from retrain.api import PluginContext, Watcher, hookimpl, load_plugins
from retrain.kernel.registry import Owner, Plugins
from retrain.observe.console.panel import LiveDisplay
from retrain.run.configure import load_checked
from retrain.run.session import train

PICTURES = Path(__file__).parent / "pages" / "pictures"
CHROMIUM = next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), "")
SHOWN_LINES = 8
DRAWN_AT_STEP = 34
WIDTH_COLUMNS = 100  # which every line fits
CAMPAIGN = """\
[campaign]
seeds = [1, 2, 3]
max_steps = 40
parallel = true
max_workers = 2

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

[model]
model = "builtin:tiny"
lora_rank = 16

[backend]
backend = "local"
devices = "cpu"

[sepa]
steps = 25
delay_steps = 5

[training]
batch_size = 8
group_size = 16
max_tokens = 64
temperature = 1.0
lr = 3e-3

[data]
source = "arithmetic"
instruction = 'Put your final answer in \\boxed{}.'

[reward]
type = "match"

[eval]
every = 10
examples = 64
samples = 4
seed = 0
"""


class Photographer(logging.Handler, Watcher):
    """A plugin that keeps the lines a run prints, and draws them with the live panel while one step is under way."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.INFO)
        self.display = LiveDisplay(Console(file=StringIO(), width=WIDTH_COLUMNS))
        self._file = file
        self._lines: list[str] = []
        self._is_drawn = True

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line."""
        self._lines.append(record.getMessage())

    @hookimpl
    def retrain_watch_run(self, context: PluginContext) -> Photographer:
        """Draw once half of the completions are done."""
        progress = context.sampling_progress
        count = progress.add

        def add(done: int = 0, **counts: int) -> None:
            count(done, **counts)
            if not self._is_drawn and 2 * progress.done >= progress.total:
                self._draw()

        progress.add = add  # type: ignore[method-assign]
        return self

    def phase(self, step: int, phase: str) -> None:
        """Draw while the chosen step is sampled."""
        self._is_drawn = (step, phase) != (DRAWN_AT_STEP, "sampling")

    def _draw(self) -> None:
        self._is_drawn = True
        console = Console(
            file=StringIO(), record=True, width=WIDTH_COLUMNS, force_terminal=True, color_system="truecolor"
        )
        for line in self._lines[-SHOWN_LINES:]:
            console.print(Text(line), highlight=False)
        console.print(self.display.picture())
        self._file.write_text(console.export_svg(title="retrain"), encoding="utf-8")


def main() -> None:
    """Make all pictures, or leave with what is missing."""
    if not CHROMIUM:
        sys.exit("Chromium is not installed: the report and the heat map cannot be photographed")
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "campaign.toml").write_text(CAMPAIGN, encoding="utf-8")
        draw_display(folder, PICTURES / "live.svg")
        retrain("campaign.toml", cwd=folder)
        campaign = next((folder / "logs").glob("campaign_*")).relative_to(folder)
        retrain("report", str(campaign), "-o", "report.html", cwd=folder)
        photograph(folder / "report.html", PICTURES / "report.png", height_px=1500)
        run = campaign / "runs" / "maxrl+gtpo_sepa_s1"
        retrain("credit", str(run), "--step", "8", "--html", "credit.html", cwd=folder)
        photograph(folder / "credit.html", PICTURES / "credit.png", height_px=700)
    for file in sorted(PICTURES.iterdir()):
        print(f"{file.relative_to(Path.cwd())}: {file.stat().st_size / 1e3:.0f} kB")


def draw_display(folder: Path, file: Path) -> None:
    """Train one run of the campaign's configuration in this process, and draw its live display."""
    base = CAMPAIGN.partition("[model]")
    (folder / "retrain.toml").write_text(base[1] + base[2], encoding="utf-8")
    plugins: Plugins = load_plugins()
    photographer = Photographer(file)
    for plugin in (photographer.display, photographer):
        plugins.add(plugin, Owner(distribution="pictures", source=type(plugin).__name__))
    logger = logging.getLogger("retrain")
    logger.setLevel(logging.INFO)
    logger.addHandler(photographer)
    here = Path.cwd()
    os.chdir(folder)
    try:
        arguments = ("retrain.toml", "--seed", "1", "--max-steps", str(DRAWN_AT_STEP + 6), "--log-dir", "logs/one")
        checked = load_checked(arguments, plugins)
        train(checked, plugins)
    finally:
        os.chdir(here)
        logger.removeHandler(photographer)


def retrain(*arguments: str, cwd: Path) -> None:
    """Run the command as a user would; CalledProcessError when it fails."""
    subprocess.run([sys.executable, "-m", "retrain", *arguments], cwd=cwd, check=True)


def photograph(page: Path, file: Path, *, height_px: int, width_px: int = 1280) -> None:
    """The top of a page as headless Chromium shows it."""
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    options: Mapping[str, Any] = {"check": True, "timeout": 120, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                *(CHROMIUM, "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run", *sandbox),
                *(f"--user-data-dir={profile}", "--virtual-time-budget=5000", f"--window-size={width_px},{height_px}"),
                *(f"--screenshot={file}", page.as_uri()),
            ],
            **options,
        )


if __name__ == "__main__":
    main()
