"""The templates of `retrain init`: the file of each, and the text of those that come with the kernel."""

from __future__ import annotations

from pathlib import Path

from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins

DEFAULT_FILE = "retrain.toml"

DEFAULT = """\
# retrain: a run with the documented defaults. `retrain explain` describes it.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
lora_rank = 32

[algorithm]                     # in place of these two: recipe = "dapo", or another algorithm of the field
advantage_mode = "maxrl"        # grpo | maxrl
transform_mode = "gtpo_sepa"    # none | gtpo | gtpo_hicra | gtpo_sepa

[training]
max_steps = 100
batch_size = 4                  # prompts per step
group_size = 16                 # completions per prompt
max_tokens = 10240
lr = 4e-5

[data]
source = "math"

[logging]
log_dir = "logs/my_run"
"""

QUICKSTART = """\
# retrain: a short, cheap smoke test of a real model. `retrain explain` describes it.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"

[algorithm]
advantage_mode = "grpo"
transform_mode = "none"

[training]
max_steps = 20
batch_size = 2
group_size = 8
max_tokens = 1024
save_every = 0                  # only the final adapter

[logging]
log_dir = "logs/quickstart"
"""

EXPERIMENT = """\
# retrain: a seeded run for comparisons, evaluated on held-out examples before, every 50 steps and after.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
lora_rank = 32

[algorithm]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

[training]
seed = 42
max_steps = 500
batch_size = 8
group_size = 16
max_tokens = 10240
save_every = 50

[sepa]
steps = 500
delay_steps = 50
correct_rate_gate = 0.1

[eval]
every = 50
examples = 64
samples = 4

[logging]
log_dir = "logs/experiment"
"""


def template_text(plugins: Plugins, name: str, output: Path | None = None) -> tuple[Path, str]:
    """The template's file, or `output`, and its text. PluginError names the nearest template."""
    found = resolve(plugins, Kind.TEMPLATE, name, where="--template")
    text: str = found.target() if callable(found.target) else found.target
    return output or Path(found.traits if isinstance(found.traits, str) else DEFAULT_FILE), text


def refuse_existing(file: Path) -> None:
    """ConfigError when the path exists, even as a dangling link."""
    if file.exists() or file.is_symlink():
        what, fix = "the file exists already; nothing was written", "remove it, or name another with --output FILE"
        raise ConfigError(Problem(code="init.file-exists", where=str(file), what=what, fix=fix))
