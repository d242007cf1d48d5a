"""The model card of what a run trained: made of the run's own records, without secrets and without paths."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.records.reading import Record
from retrain.records.run import Run
from retrain.run.subject import Subject
from retrain.text.amounts import percent, rate_interval
from retrain.text.secrets import redacted
from retrain.text.tables import markdown_table
from retrain.text.terminal_text import printable

MOST_ROWS = 12  # of the table of steps
CURVES = {"mean_reward": "mean reward", "correct_rate": "correct", "mean_tokens": "tokens"}
CI_LOW = "ci_low"
# Where a run was, not what it was.
LOCAL_TABLES = ("logging", "backpressure", "deadlines", "resume")
LOCAL_KEYS = ("backend.adapter_path", "backend.devices", "backend.throttle_dir", "inference.adapter_dir")
PATH_KEYS = ("data.path", "sft.path", "model.adapter", "teacher.adapter", "squeeze.adapter_path")
RUN_FILE = "retrain.toml"
USE_ADAPTER = """## Use it

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained(BASE)
model = PeftModel.from_pretrained(base, REPO)
```"""
USE_MODEL = """## Use it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(REPO)
tokenizer = AutoTokenizer.from_pretrained(REPO)
```"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The text of README.md, and of the configuration that repeats the run; "" without a run."""

    readme: str
    config: str


def make_card(subject: Subject, *, repo: str, is_adapter: bool, notes: Sequence[str]) -> Card:
    """The card of a subject for the repository `repo`, which holds an adapter or whole weights.

    `notes` are remarks about its files. ConfigError when the run's records cannot be read.
    """
    base = public_name(subject.model)
    parts = [_front_matter(base, is_adapter), f"# {repo.rpartition('/')[2]}", _what(subject, base, is_adapter, notes)]
    config = ""
    if subject.run is not None:
        manifest = Run(subject.run).started_manifest()
        lines = list(_lines(Run(subject.run), subject.steps))
        config = repeating_config(manifest)
        parts += [*_training(manifest), *_held_out(lines), *_curves(lines), _repeat(manifest, config)]
    parts.append(_use(repo, base, is_adapter))
    text = "\n\n".join(part for part in parts if part) + "\n"
    return Card(readme=redacted(text), config=redacted(config))


def public_name(path: str) -> str:
    """A hub id or a built-in name as it is; of anything that is a path, the last part."""
    is_path = path.startswith(("/", "~", ".")) or "\\" in path or Path(path).exists()
    return (Path(path).name if is_path else path) or path


def repeating_config(manifest: Record) -> str:
    """The keys that the run had set, as TOML; paths are reduced to their last part."""
    config, origins = manifest.get("config", {}), manifest.get("origins", {})
    tables: dict[str, dict[str, Any]] = {}
    for name, table in config.items():
        for key, value in table.items() if isinstance(table, dict) else ():
            path = f"{name}.{key}"
            is_set = str(origins.get(path, DEFAULT_ORIGIN)) != str(DEFAULT_ORIGIN)
            if is_set and name not in LOCAL_TABLES and path not in LOCAL_KEYS:
                tables.setdefault(name, {})[key] = _public(value, is_path=path in PATH_KEYS)
    tables.setdefault("training", {})["seed"] = manifest.get("seed", 0)
    return tomli_w.dumps(tables)


def _public(value: Any, *, is_path: bool = False) -> Any:
    if isinstance(value, str):
        return Path(value).name if is_path else public_name(value)
    if isinstance(value, Mapping):
        return {str(key): _public(item) for key, item in value.items()}
    return [_public(item) for item in value] if isinstance(value, list | tuple) else value


def _lines(run: Run, steps: int | None) -> Iterator[Record]:
    """The lines of the steps that are in the checkpoint; -1 is the evaluation before training."""
    for step, line in run.steps():
        if step >= -1 and (steps is None or step < steps):
            yield line


def _front_matter(base: str, is_adapter: bool) -> str:
    library = "peft" if is_adapter else "transformers"
    is_hub_id = "/" in base
    base_lines = [f"base_model: {base}", f"base_model_relation: {'adapter' if is_adapter else 'finetune'}"]
    tags = ["reinforcement-learning", "rlvr", "retrain", *(["lora"] if is_adapter else [])]
    lines = [*(base_lines if is_hub_id else []), f"library_name: {library}", "pipeline_tag: text-generation", "tags:"]
    return "\n".join(["---", *lines, *(f"- {tag}" for tag in tags), "---"])


def _what(subject: Subject, base: str, is_adapter: bool, notes: Sequence[str]) -> str:
    kind = "A LoRA adapter for" if is_adapter else "The weights of"
    how = ", trained by reinforcement learning with verifiable rewards" if subject.run else ""
    at = f" Checkpoint `{subject.checkpoint}`, {subject.steps} optimizer steps." if subject.run else ""
    first = f"{kind} `{_code(base)}`{how}.{at}"
    licence = "Licence: that of the base model applies; name it here (`license:` in the lines above) before publishing."
    return "\n\n".join([first, *notes, licence])


def _training(manifest: Record) -> Iterator[str]:
    config = manifest.get("config", {})
    data, reward, training = (config.get(name, {}) for name in ("data", "reward", "training"))
    identity, examples = manifest.get("identity", {}), manifest.get("examples", {})
    source = str(data.get("source", ""))
    data_digest = identity.get("data", {}).get("digest", "") if identity.get("data", {}).get("num_files") else ""
    path = f" `{_code(Path(str(data['path'])).name)}`" if data.get("path") else ""
    rows = {
        "data": f"`{_code(source)}`{path}, {examples.get('train', '?')} examples to train on, "
        f"{examples.get('held_out', 0)} held out",
        "hash of the examples": f"`{examples.get('digest', '')}`",
        "hash of the data files": f"`{data_digest}`" if data_digest else "",
        "reward": f"`{_code(_public(str(reward.get('type', ''))))}`",
        "algorithm": f"`{_code(str(manifest.get('condition', '')))}`, loss `{_of(config, 'algorithm', 'loss')}`",
        "batch": f"{training.get('batch_size')} prompts x {training.get('group_size')} completions of at most "
        f"{training.get('max_tokens')} tokens, temperature {training.get('temperature')}",
        "learning rate": str(training.get("lr", "")),
        "adapter": _adapter_row(config),
        "seed": str(manifest.get("seed", "")),
        "hardware": str(manifest.get("devices", {}).get("used", "")),
    }
    yield "## Training"
    yield _table(("", ""), [(name, value) for name, value in rows.items() if value])


def _adapter_row(config: Mapping[str, Any]) -> str:
    rank = _of(config, "model", "lora_rank")
    lora = config.get("lora", {})
    kinds = [name for name in ("rslora", "dora") if lora.get(name)]
    quantize = _of(config, "model", "quantize")
    on = f", on matrices in {quantize}" if quantize not in (None, "none") else ""
    return (
        f"rank {rank}, alpha {lora.get('alpha') or 2 * rank}{''.join(f', {k}' for k in kinds)}{on}"
        if rank
        else "none: all weights"
    )


def _of(config: Mapping[str, Any], table: str, key: str) -> Any:
    return config.get(table, {}).get(key)


def _held_out(lines: Sequence[Record]) -> Iterator[str]:
    """Every held-out rate with its interval, at the first and the last evaluation."""
    evaluated = [line for line in lines if any(key.endswith(CI_LOW) for key in line)]
    if not evaluated:
        return
    first, last = evaluated[0], evaluated[-1]
    rows = []
    for low in sorted(key for key in last if key.endswith(CI_LOW)):
        stem = low.removesuffix(CI_LOW)
        name = stem.removesuffix("_").removeprefix("eval").removeprefix("_") or "held out"
        examples = last.get(f"{stem}examples", "?")
        rows.append((printable(name), str(examples), _rate(first, stem), _rate(last, stem)))
    yield "## Held-out examples"
    yield "Rate of correct answers with its 95 % interval; none of these examples was trained on."
    yield _table(("set", "examples", _when(first), _when(last)), rows)


def _when(line: Record) -> str:
    step = int(line.get("step", -1))
    return "before training" if step < 0 else f"after {step + 1} steps"


def _rate(line: Record, stem: str) -> str:
    rate, low, high = (line.get(f"{stem}{name}") for name in ("correct_rate", "ci_low", "ci_high"))
    if rate is None or low is None or high is None:
        return "not measured"
    return f"{percent(rate)} {rate_interval(low, high)}"


def _curves(lines: Sequence[Record]) -> Iterator[str]:
    steps = [line for line in lines if line.get("step", -1) >= 0]
    names = [name for name in CURVES if any(name in line for line in steps)]
    if not steps or not names:
        return
    stride = math.ceil(len(steps) / MOST_ROWS)
    shown = steps[::stride] if steps[-1] in steps[::stride] else [*steps[::stride], steps[-1]]
    rows = [(str(line["step"]), *(_number(line.get(name)) for name in names)) for line in shown]
    yield "## Curves"
    yield _table(("step", *(CURVES[name] for name in names)), rows)


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else ""


def _repeat(manifest: Record, config: str) -> str:
    versions = {**manifest.get("distributions", {}), **manifest.get("libraries", {})}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commit = manifest.get("git", {}).get("commit", "")
    at = f" Commit of the folder that it ran in: `{commit}`." if commit else ""
    return (
        f"## Repeat it\n\n```bash\nretrain {RUN_FILE}\n```\n\n`{RUN_FILE}` is in this repository:\n\n"
        f"```toml\n{_code(config)}```\n\nPython {manifest.get('python', '')}, {listed}.{at}"
    )


def _use(repo: str, base: str, is_adapter: bool) -> str:
    code = USE_ADAPTER if is_adapter else USE_MODEL
    return code.replace("BASE", json.dumps(base)).replace("REPO", json.dumps(repo))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join(markdown_table(head, cells, num_names=len(head)))


def _code(text: str) -> str:
    """Text that cannot leave its code span or block, nor be markup."""
    return "\n".join(printable(line) for line in text.replace("`", "'").split("\n"))
