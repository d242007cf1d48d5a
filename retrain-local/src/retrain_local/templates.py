"""The configurations that `retrain init --template` writes for a CPU, as TOML files in this package."""

from functools import partial
from pathlib import Path

TINY = partial(Path(__file__).with_name("tiny.toml").read_text, encoding="utf-8")
SMOLLM2 = partial(Path(__file__).with_name("smollm2.toml").read_text, encoding="utf-8")
