"""What the tests of the core share: configurations, distributions on the path, a toy policy, run folders, campaigns."""

import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Completion, Example, Group, Score, StopReason
from retrain.run.tables import registered_tables
from tests.kit import made_runs

settings.register_profile("retrain-core", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("retrain-core")

GONE = 2**22 + 1  # above the largest process id that Linux and macOS hand out
TOYS = Path(__file__).parent / "toys" / "toy_parts.py"
TOYS_OVERLAP = TOYS.with_name("toy_overlap.py")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")

Loaded = tuple[Config, list[Problem]]
Distribution = Callable[..., Path]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither settings nor secrets of the machine take part in a test."""
    for name in list(os.environ):
        if name.startswith("RETRAIN_") or any(word in name.upper() for word in SECRET_WORDS):
            monkeypatch.delenv(name)


@pytest.fixture
def plugins() -> Plugins:
    """Everything installed, with no setting of the environment."""
    return load_plugins({})


@pytest.fixture(scope="session")
def tables() -> Mapping[str, TableEntry]:
    """Every registered table."""
    return registered_tables(load_plugins({}))


@pytest.fixture
def load(tmp_path: Path, tables: Mapping[str, TableEntry]) -> Callable[..., Loaded]:
    """`load(text, *arguments, environ={})`: the configuration and its problems."""

    def load_text(text: str = "", *arguments: str, environ: Mapping[str, str] | None = None) -> Loaded:
        file = tmp_path / "retrain.toml"
        file.write_text(text, encoding="utf-8")
        return load_config(file, tables=tables, arguments=arguments, environ=environ or {})

    return load_text


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Distribution]:
    """`distribution(name, modules, entry="module")`: an installed distribution, with metadata and entry point."""
    site = tmp_path / "site"
    installed: set[str] = set()

    def install(name: str, modules: Mapping[str, str], *, entry: str = "", version: str = "1.0") -> Path:
        site.mkdir(exist_ok=True)
        installed.update(modules)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source, encoding="utf-8")
            monkeypatch.delitem(sys.modules, module, raising=False)
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[retrain]\nmain = {entry or next(iter(modules))}\n", encoding="utf-8")
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site))
        importlib.invalidate_caches()
        return site

    yield install
    for module in installed:  # or a later test finds the name taken
        sys.modules.pop(module, None)


@pytest.fixture
def toys(distribution: Distribution) -> Path:
    """The distribution `retrain-toys`: backend `toy`, data source `toy`, reward `toy`, and credit parts."""
    return distribution("retrain-toys", {"toy_parts": TOYS.read_text(encoding="utf-8")})


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer of twenty words, saved the way `transformers` saves it; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<unk>", *(str(digit) for digit in range(10)), "what", "is", "plus", "?", "so", "wait", "ok", "."]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


def of_toys(model: Path, flags: str, *, backend: str = "toy", reward: str = "toy") -> list[str]:
    """Arguments of a short run of the toys with these flags."""
    base = f"--backend {backend} --data-source toy --reward-type {reward} --max-tokens 3 --seed 1 --temperature 1.0"
    modes = "--advantage-mode grpo --transform-mode toy_flat --uncertainty-kind toy_nll"
    return ["--model", str(model), "--data-instruction", "", *f"{base} {modes} {flags}".split()]


@pytest.fixture
def toy_arguments(toys: Path, tokenizer_folder: Path) -> list[str]:
    """Arguments of a short run of the toys, without its number of steps."""
    return of_toys(tokenizer_folder, "--batch-size 2 --group-size 4")


@dataclass(frozen=True, slots=True)
class Result:
    """Exit code and output of one command."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """`command("explain", "--json")`: one command line, run in this process with `tmp_path` as its folder."""
    from retrain.cli.command_line import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(logging, "raiseExceptions", False)  # a library's handler may hold an earlier test's stderr

    def call(*arguments: str) -> Result:
        importlib.invalidate_caches()
        capsys.readouterr()
        code = run(list(arguments))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Plain names for texts that a terminal or a file cannot hold, and for sequences of arguments."""
    if isinstance(val, str):
        return ascii(val)[1:61]
    if isinstance(val, tuple | list) and val and all(isinstance(part, str) for part in val):
        return ascii(" ".join(val))[1:61]
    return None


@pytest.fixture
def make_completion() -> Callable[..., Completion]:
    """`make_completion(logprobs, prompt=2)`: two prompt tokens, then one sampled token per log-probability."""

    def make(logprobs: Sequence[float] = (-1.0,), *, prompt: int = 2, **more: Any) -> Completion:
        length = prompt + len(logprobs)
        entropies = more.pop("entropies", None)
        return Completion(
            tokens_T=np.arange(length),
            action_T=np.arange(length) >= prompt,
            logprobs_T=np.concatenate([np.zeros(prompt), np.asarray(logprobs, dtype=np.float64)]),
            entropies_T=None if entropies is None else np.concatenate([np.zeros(prompt), entropies]),
            **({"text": "", "stop_reason": StopReason.EOS, "policy_version": 0} | more),
        )

    return make


@pytest.fixture
def make_group(make_completion: Callable[..., Completion]) -> Callable[..., Group]:
    """`make_group(1, 0, None, "failed")`: a number is a score, None no verdict, text a failure."""

    def score(value: float | str | None) -> Score:
        if isinstance(value, str):
            return Score.failed(value)
        return Score.no_verdict("cannot tell") if value is None else Score.of(value)

    def make(*values: float | str | None, reference: str = "7", completions: Sequence[Completion] = ()) -> Group:
        return Group(
            example=Example(id="e", prompt="p", reference=reference),
            completions=tuple(completions) or tuple(make_completion() for _ in values),
            scores=tuple(score(value) for value in values),
        )

    return make


@pytest.fixture
def disturbed(toys: Path, distribution: Callable[..., Path]) -> Any:
    """Where the tests put what is to happen in either half."""
    distribution("retrain-overlap", {"toy_overlap": TOYS_OVERLAP.read_text(encoding="utf-8")})
    return importlib.import_module("toy_overlap").Disturbed


@pytest.fixture
def run_overlapped(command: Callable[..., Any], disturbed: Any, tokenizer_folder: Path) -> Callable[..., Any]:
    """`run_overlapped("--seed", "2")`: a short run that samples while it trains; returns the command's result."""
    flags = "--max-steps 5 --batch-size 4 --group-size 8 --save-every 0 --scoring-audit off"
    base = of_toys(tokenizer_folder, flags, backend="toy_overlap", reward="toy_wordy")
    return lambda *arguments: command(*base, *arguments)


@pytest.fixture(scope="session")
def made() -> ModuleType:
    """`made.write_campaign(...)`, `made.write_run(...)`, `made.MadeRun(...)`."""
    return made_runs


@pytest.fixture
def compare(command: Callable[..., Any]) -> Callable[..., Any]:
    """`compare("campaign", "--metric", "...")`: the result of `retrain compare`."""

    def call(*arguments: object) -> Any:
        return command("compare", *map(str, arguments))

    return call


@pytest.fixture
def printed_json(command: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """`printed_json("status", "logs")`: the JSON of a command, which must be all that is printed."""

    def call(*arguments: object) -> dict[str, Any]:
        result = command(*map(str, arguments), "--json")
        assert (result.code, result.err) == (0, ""), result.err
        content: dict[str, Any] = json.loads(result.out, parse_constant=pytest.fail)
        return content

    return call


@pytest.fixture
def compare_json(printed_json: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return partial(printed_json, "compare")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("logs/a", steps=3, status="done", idle_s=0, ...)`: a run folder; `metrics=` gives its raw text."""

    def make(
        name: str,
        *,
        steps: int = 3,
        status: str = "done",
        pid: int = GONE,
        max_steps: int = 10,
        idle_s: float = 0.0,
        metrics: str | None = None,
        **manifest: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        ended = datetime.now(UTC) - timedelta(seconds=idle_s)
        content = {
            "status": status,
            "pid": pid,
            "started": (ended - timedelta(seconds=100)).isoformat(timespec="seconds"),
            "condition": "maxrl+none",
            "config": {"training": {"max_steps": max_steps}},
        }
        content |= {"ended": ended.isoformat(timespec="seconds")} if status != "running" else {}
        (folder / "run.json").write_text(json.dumps(content | manifest), encoding="utf-8")
        (folder / "config.toml").write_text(f"[training]\nmax_steps = {max_steps}\n", encoding="utf-8")
        (folder / "emergence").mkdir()
        rates = {step: {"step": step, "mean_reward": step / 10, "correct_rate": step / 10} for step in range(steps)}
        same = {"condition": "maxrl+none", "step_time_s": 1.5}
        lines = [json.dumps(rates[step] | same | {"loss": 0.5 - step / 100}) + "\n" for step in rates]
        (folder / "metrics.jsonl").write_text("".join(lines) if metrics is None else metrics, encoding="utf-8")
        rows = [
            {"step": s, "group": 0, "index": i, "example_id": f"e{s}", "num_tokens": 2} for s in rates for i in (0, 1)
        ]
        texts = [json.dumps({**row, "completion": f"c{row['step']}{row['index']}"}) + "\n" for row in rows]
        (folder / "emergence/generations.jsonl").write_text("".join(texts), encoding="utf-8")
        for file in (folder / "run.json", folder / "metrics.jsonl"):
            os.utime(file, (time.time() - idle_s,) * 2)
        return folder

    return make


@pytest.fixture
def toy_run(command: Callable[..., Any], toys: Path, tokenizer_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """`toy_run("a", "--lr", "1")`: the folder of a real run of the toy policy."""
    base = of_toys(tokenizer_folder, "--max-steps 4 --batch-size 2 --group-size 8 --save-every 0")

    def call(name: str, *arguments: str) -> Path:
        result = command(*base, "--log-dir", name, *arguments)
        assert result.code == 0, result.err
        return tmp_path / name

    return call


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A live process of our own."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()
