"""The campaigns that `retrain init` writes, as TOML files in this folder."""

from functools import partial
from pathlib import Path


def _read(name: str, base: str = "") -> str:
    head = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return head + "".join(_read(base).partition("# Everything below")[1:]) if base else head


CAMPAIGN, TUNED, TASKS = (partial(_read, f"{name}.toml") for name in ("campaign", "tuned", "tasks"))
TINY = partial(_read, "tiny.toml")
FACTORIAL, SENSITIVITY = (partial(_read, f"{name}.toml", "tiny.toml") for name in ("factorial", "sensitivity"))
