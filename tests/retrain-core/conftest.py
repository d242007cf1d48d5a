"""What the kernel's tests share: configurations from text, real distributions on the path, and a toy policy."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.types import Completion, Example, Group, Score, StopReason
from retrain.rooms.session.check import registered_tables

settings.register_profile("retrain-core", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("retrain-core")

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


@pytest.fixture
def toy_arguments(toys: Path, tokenizer_folder: Path) -> list[str]:
    """Arguments of a short run of the toys, without its number of steps."""
    parts = ["--model", str(tokenizer_folder), "--backend", "toy", "--data-source", "toy", "--reward-type", "toy"]
    parts += ["--batch-size", "2", "--group-size", "4", "--max-tokens", "3", "--seed", "1"]
    parts += ["--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll"]
    return [*parts, "--data-instruction", "", "--temperature", "1.0"]


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
    from retrain.rooms.cli.main import run

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
    base = ["--model", str(tokenizer_folder), "--backend", "toy_overlap", "--data-source", "toy"]
    base += [
        "--reward-type",
        "toy_wordy",
        "--max-steps",
        "5",
        "--batch-size",
        "4",
        "--group-size",
        "8",
        "--max-tokens",
        "3",
    ]
    base += ["--seed", "1", "--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll"]
    base += ["--data-instruction", "", "--temperature", "1.0", "--save-every", "0", "--scoring-audit", "off"]
    return lambda *arguments: command(*base, *arguments)
