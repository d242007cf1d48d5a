"""The campaigns that `retrain init` writes, as TOML files in this folder."""

from functools import partial
from pathlib import Path

CAMPAIGN = partial(Path(__file__).with_name("campaign.toml").read_text, encoding="utf-8")
TINY = partial(Path(__file__).with_name("tiny.toml").read_text, encoding="utf-8")
TASKS = partial(Path(__file__).with_name("tasks.toml").read_text, encoding="utf-8")
