"""The campaigns that `retrain init` writes, as TOML files in this folder."""

from functools import partial
from pathlib import Path

CAMPAIGN = partial(Path(__file__).with_name("campaign.toml").read_text, encoding="utf-8")
TUNED = partial(Path(__file__).with_name("tuned.toml").read_text, encoding="utf-8")
TINY = partial(Path(__file__).with_name("tiny.toml").read_text, encoding="utf-8")
TASKS = partial(Path(__file__).with_name("tasks.toml").read_text, encoding="utf-8")


def _on_the_base_of_tiny(name: str) -> str:
    head = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return head + TINY()[TINY().index("# Everything below") :]


FACTORIAL = partial(_on_the_base_of_tiny, "factorial.toml")
SENSITIVITY = partial(_on_the_base_of_tiny, "sensitivity.toml")
