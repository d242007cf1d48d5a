"""The run folder: taken for one run at a time, with an earlier run's records moved aside, never overwritten."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError, Problem
from retrain.records.files import JsonLines, write_folder, write_json, write_text
from retrain.records.tokens import TokenRecord, write_tokens

LOG = logging.getLogger("retrain")
MARK = "run.json"


class RunFolder:
    """`<log_dir>` of one run: `run.json`, `config.toml`, `metrics.jsonl`, `emergence/`, `trainer_state.json`."""

    def __init__(self, path: Path, adapters: Path) -> None:
        self.path = path
        self.adapters = adapters
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._steps = JsonLines(path / "emergence" / "steps.jsonl")
        self._generations = JsonLines(path / "emergence" / "generations.jsonl")

    def write_manifest(self, manifest: Mapping[str, Any], config_toml: str) -> None:
        """Write `run.json`, and the resolved `config.toml` that runs again as it is."""
        write_text(self.path / "config.toml", config_toml)
        write_json(self.path / MARK, manifest)

    def rewrite_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Replace `run.json`, to say how the run ended."""
        write_json(self.path / MARK, manifest)

    def write_step(
        self,
        metrics: Mapping[str, Any],
        summary: Mapping[str, Any],
        generations: Iterable[Mapping[str, Any]],
        tokens: Sequence[TokenRecord],
    ) -> None:
        """One step: its completions first, its metrics line last, so that a line means that the step is whole."""
        write_tokens(self.path / "emergence", metrics["step"], tokens)
        self._generations.write(generations)
        self._steps.write([summary])
        self._metrics.write([metrics])

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """A metrics line that belongs to no step: the evaluation before training."""
        self._metrics.write([metrics])

    def save_adapter(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Write an adapter checkpoint through `fill(folder)`; visible only when complete."""
        self.adapters.mkdir(parents=True, exist_ok=True)
        write_folder(self.adapters / name, fill)
        return self.adapters / name

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace `trainer_state.json`."""
        write_json(self.path / "trainer_state.json", state)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._metrics, self._steps, self._generations):
            stream.close()


def open_run_folder(log_dir: str, adapter_path: str) -> RunFolder:
    """Take `log_dir` for a new run; records of an earlier run there move to `<log_dir>.1`, `.2`, ..."""
    path, adapters = _folders(log_dir, adapter_path)
    if (path / MARK).exists():
        number = 1
        while (aside := path.with_name(f"{path.name}.{number}")).exists():
            number += 1
        path.rename(aside)
        LOG.info("Records of an earlier run in %s moved to %s", path, aside)
    return RunFolder(path, adapters)


def check_run_folder(log_dir: str, adapter_path: str, *, place: str) -> None:
    """ConfigError when the folders cannot be written, or belong to a run that is still alive."""
    path, adapters = _folders(log_dir, adapter_path)
    pid = _pid(path)
    if pid and pid != os.getpid() and _is_alive(pid):
        what = f"{path} belongs to a run that is still going on (process {pid})"
        raise ConfigError(Problem(where=place, what=what, fix="wait for it, or choose another --log-dir"))
    if Path.cwd().resolve().is_relative_to(path.resolve()):  # moving records aside would move the user's files
        what = f"{path} is the current folder, or holds it"
        raise ConfigError(Problem(where=place, what=what, fix="choose a folder of its own, such as logs/train"))
    for folder in (path, adapters):
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            for each in made:  # nothing is left behind by a run that does not start
                each.rmdir()
        except OSError as error:
            what = f"cannot write {folder}: {error.strerror or error}"
            fix = "choose folders that you may write: [logging] log_dir, [backend] adapter_path"
            raise ConfigError(Problem(where=place, what=what, fix=fix)) from error


def _folders(log_dir: str, adapter_path: str) -> tuple[Path, Path]:
    path = Path(log_dir).expanduser()
    return path, Path(adapter_path).expanduser() if adapter_path else path / "adapter"


def _pid(path: Path) -> int:
    try:
        manifest = json.loads((path / MARK).read_text(encoding="utf-8"))
        return int(manifest.get("pid") or 0) if manifest.get("status") == "running" else 0
    except (OSError, ValueError, TypeError, OverflowError, AttributeError):
        return 0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except OSError:
        return True
    return True
