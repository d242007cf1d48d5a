"""`retrain export SUBJECT --push REPO`: the folder that goes to the Hugging Face hub, and its upload."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from jinja2 import Environment, PackageLoader

from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.records.checkpoints import ADAPTER_CONFIG
from retrain.records.reading import Record, read_object
from retrain.records.run import Run
from retrain.run.subject import HUB_ID, Subject
from retrain.text.amounts import percent, rate_interval
from retrain.text.secrets import hide_text, redacted
from retrain.text.tables import markdown_table
from retrain.text.terminal_text import printable
from retrain.use.whole_model import WholeModel, fill_new, usage_error

ADAPTER_FILE = "adapter_model.safetensors"
MOST_ROWS = 12  # of the table of steps
CURVES = {"mean_reward": "mean reward", "correct_rate": "correct", "mean_tokens": "tokens"}
CI_LOW = "ci_low"
# They say where a run was; a model card must not.
LOCAL_TABLES = ("logging", "backpressure", "deadlines", "resume")
LOCAL_KEYS = ("backend.adapter_path", "backend.devices", "backend.throttle_dir", "inference.adapter_dir")
PATH_KEYS = ("data.path", "sft.path", "model.adapter", "teacher.adapter", "squeeze.adapter_path")
RUN_FILE = "retrain.toml"


def push(
    whole: WholeModel, repo: str, *, merged: bool, private: bool, dry_run: bool, out: Path | None
) -> tuple[Mapping[str, Any], list[str]]:
    if not HUB_ID.fullmatch(repo):
        what = f"{repo!r} is not the name of a repository"
        raise usage_error(code="export.bad-repository", what=what, fix="give NAME or OWNER/NAME")
    if out and not dry_run:
        fix = "add --dry-run, or leave --out away"
        raise usage_error(code="export.needs-dry-run", what="--push with --out needs --dry-run", fix=fix)
    found = whole.subject
    if dry_run:
        folder = out or Path(repo.rpartition("/")[2])
        notes, url = _write_hub_folder(whole, folder, repo, merged=merged), ""
        line = f"{found.label}: the folder for {repo} is {folder}; nothing was uploaded"
    else:
        with tempfile.TemporaryDirectory(prefix="retrain-push-") as scratch:
            folder = Path(scratch) / "folder"
            notes = _write_hub_folder(whole, folder, repo, merged=merged)
            url = upload(folder, repo, private=private)
        line = f"{found.label} is at {url}"
    data = {"subject": found.named, "repo": repo, "folder": str(folder) if dry_run else None, "url": url or None}
    return {**data, "notes": notes}, [line, *(f"  {note}" for note in notes)]


def _write_hub_folder(whole: WholeModel, out: Path, repo: str, *, merged: bool) -> list[str]:
    found, adapter = whole.subject, None if merged else whole.adapter
    if found.folder is None and found.run is None:
        what = f"{found.named} is an untrained model: there is nothing to push"
        raise usage_error(code="export.nothing-to-push", what=what, fix="name a run or an adapter")
    base, notes = public_name(found.model), list[str]()
    if adapter and "/" not in base:
        notes.append(f"The base, {base}, is no repository of the hub: --format transformers pushes whole weights.")

    def fill(folder: Path) -> None:
        if adapter:
            document = {**read_object(adapter / ADAPTER_CONFIG), "base_model_name_or_path": base}
            text = json.dumps(document, indent=2, sort_keys=True) + "\n"
            (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
            shutil.copyfile(adapter / ADAPTER_FILE, folder / ADAPTER_FILE)
        else:
            whole.write(folder, "folder")
        readme, config = make_card(found, repo=repo, is_adapter=adapter is not None, notes=notes)
        (folder / "README.md").write_text(readme, encoding="utf-8")
        if config:
            (folder / RUN_FILE).write_text(config, encoding="utf-8")

    fill_new(out, fill)
    return notes


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Create the repository if it is missing, and add the folder's files as one commit; returns its address.

    BackendError gives the reason of a failure.
    """
    from huggingface_hub import HfApi, get_token

    if not get_token():
        what, fix = "there is no token for the hub", "run `hf auth login`, or set HF_TOKEN, or add --dry-run"
        raise ConfigError(Problem(code="export.no-token", where="retrain export --push", what=what, fix=fix))
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=made.repo_id, commit_message="Trained with retrain")
    except Exception as error:
        # The classes of HTTP errors depend on the version of huggingface_hub.
        # The text of an HTTP error holds the address, perhaps with a token in it.
        why = hide_text(" ".join(str(error).split())[:300])
        fix = "check the name, the connection and the rights of the token; --dry-run writes the folder only"
        what = "the upload failed"
        raise BackendError(Problem(code="export.upload-failed", where=repo, what=what, why=why, fix=fix)) from error
    return str(made)


def make_card(subject: Subject, *, repo: str, is_adapter: bool, notes: Sequence[str]) -> tuple[str, str]:
    """Return README.md of the repository `repo`, and the configuration of its run, empty without a run.

    `notes` are remarks about the files. ConfigError when the run's records cannot be read.
    """
    base = public_name(subject.model)
    values: dict[str, Any] = {"run": None, "checkpoint": subject.checkpoint, "steps": subject.steps}
    if subject.run is not None:
        values |= _about_run(Run(subject.run), subject.steps)
    environment = Environment(
        loader=PackageLoader("retrain", "use"), trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {  # `code` and `cell` make texts harmless
        "code": _code,
        "cell": lambda text: _code(str(text)).replace("|", r"\|"),
        "last_part": lambda path: Path(str(path)).name,
        "public": lambda text: _public(str(text)),
        "quoted": json.dumps,
    }
    template = environment.get_template("model_card.md.jinja")
    name = repo.rpartition("/")[2]
    readme = template.render(base=base, name=name, repo=repo, is_adapter=is_adapter, notes=notes, **values)
    return redacted(readme), redacted(values.get("config", ""))


def _about_run(run: Run, steps: int | None) -> dict[str, Any]:
    manifest = run.started_manifest()
    # -1 is the evaluation before training
    lines = [line for step, line in run.steps() if step >= -1 and (steps is None or step < steps)]
    data = manifest.get("identity", {}).get("data", {})
    versions = {**manifest.get("distributions", {}), **manifest.get("libraries", {})}
    return {
        "run": manifest,
        "data_digest": data.get("digest", "") if data.get("num_files") else "",
        "adapter": _adapter_row(manifest.get("config", {})),
        "held_out": _held_out(lines),
        "curves": _curves(lines),
        "run_file": RUN_FILE,
        "config": repeating_config(manifest),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def public_name(path: str) -> str:
    """Return a hub id or a built-in name unchanged, and the last part of any path."""
    is_path = path.startswith(("/", "~", ".")) or "\\" in path or Path(path).exists()
    return (Path(path).name if is_path else path) or path


def repeating_config(manifest: Record) -> str:
    """Return the keys that the run had set, as TOML; paths are reduced to their last part."""
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


def _adapter_row(config: Mapping[str, Any]) -> str:
    model, lora = config.get("model", {}), config.get("lora", {})
    rank, quantize = model.get("lora_rank"), model.get("quantize")
    if not rank:
        return "none: all weights"
    kinds = "".join(f", {name}" for name in ("rslora", "dora") if lora.get(name))
    on = f", on matrices in {quantize}" if quantize not in (None, "none") else ""
    return f"rank {rank}, alpha {lora.get('alpha') or 2 * rank}{kinds}{on}"


def _held_out(lines: Sequence[Record]) -> str:
    evaluated = [line for line in lines if any(key.endswith(CI_LOW) for key in line)]
    if not evaluated:
        return ""
    first, last = evaluated[0], evaluated[-1]
    rows = []
    for stem in sorted(key.removesuffix(CI_LOW) for key in last if key.endswith(CI_LOW)):
        name = stem.removesuffix("_").removeprefix("eval").removeprefix("_") or "held out"
        rows.append((printable(name), str(last.get(f"{stem}examples", "?")), _rate(first, stem), _rate(last, stem)))
    return _table(("set", "examples", _when(first), _when(last)), rows)


def _when(line: Record) -> str:
    step = int(line.get("step", -1))
    return "before training" if step < 0 else f"after {step + 1} steps"


def _rate(line: Record, stem: str) -> str:
    rate, low, high = (line.get(f"{stem}{name}") for name in ("correct_rate", "ci_low", "ci_high"))
    if rate is None or low is None or high is None:
        return "not measured"
    return f"{percent(rate)} {rate_interval(low, high)}"


def _curves(lines: Sequence[Record]) -> str:
    steps = [line for line in lines if line.get("step", -1) >= 0]
    names = [name for name in CURVES if any(name in line for line in steps)]
    if not names:
        return ""
    shown = steps[:: math.ceil(len(steps) / MOST_ROWS)]
    shown += [] if shown[-1] is steps[-1] else [steps[-1]]
    values = ((line["step"], *(line.get(name) for name in names)) for line in shown)
    rows = [
        tuple(f"{v:.3g}" if isinstance(v, float) else str(v if v is not None else "") for v in row) for row in values
    ]
    return _table(("step", *(CURVES[name] for name in names)), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = ([cell.replace("|", r"\|") for cell in row] for row in rows)
    return "\n".join(markdown_table(head, cells, num_names=len(head)))


def _code(text: str) -> str:
    """Return text that can neither leave its code span or block nor be markup."""
    return "\n".join(printable(line) for line in text.replace("`", "'").split("\n"))
