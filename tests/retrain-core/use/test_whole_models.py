"""`retrain export`: what appears, what is told, and that nothing is left of a failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from retrain.api import ExportedModel, ModelExport, Plugins, load_plugins
from retrain.records.checkpoints import save_checkpoint
from retrain.text import secrets
from retrain.use import export_command
from retrain.use.hub_upload import repeating_config
from retrain_local.model.adapter import PREFIX, Lora, adapter_config
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.hub_server import hub_server
from tests.kit.invoke import invoke
from tests.kit.problems import codes_in

TINY = BUILTIN_MODELS["tiny"]
SECRET = "sk-planted-secret-0123456789"
MODULE = "model.layers.1.mlp.up_proj"
DATA = "/home/somebody/private/tasks.jsonl"


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def exported_by(
    monkeypatch: pytest.MonkeyPatch, plugins: Plugins, write: Callable[[ModelExport], ExportedModel | None]
) -> None:
    """Let `write` write models, in place of the installed backends."""
    call = type(plugins).call_backend

    def answer(self: Plugins, function: str, *given: Any, backend: str = "") -> Any:
        return write(*given) if function == "export_model" else call(self, function, *given, backend=backend)

    monkeypatch.setattr(type(plugins), "call_backend", answer)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps, as a session leaves it."""
    folder = tmp_path / "logs" / "sums"
    folder.mkdir(parents=True)
    config = {
        "backend": {"backend": "local", "devices": "cpu", "adapter_path": ""},
        "model": {"model": "builtin:tiny", "lora_rank": 2},
        "data": {"source": "files", "path": DATA},
        "reward": {"type": "match", "custom_module": "/home/somebody/reward.py"},
        "training": {"batch_size": 2, "group_size": 4, "max_tokens": 64, "temperature": 1.0, "lr": 1e-4},
        "algorithm": {"loss": "ppo"},
        "logging": {"log_dir": "/home/somebody/logs/sums", "wandb_project": "mine"},
    }
    given = ("model.model", "model.lora_rank", "data.source", "data.path", "logging.log_dir", "backend.devices")
    manifest = {
        "status": "done",
        "started": "2026-01-01T00:00:00+00:00",
        "condition": "maxrl+`none`",
        "seed": 17,
        "config": config,
        "origins": dict.fromkeys(given, "retrain.toml:3") | {"training.lr": "default"},
        "distributions": {"retrain-core": "0.1.0"},
        "libraries": {"torch": "2.13.0"},
        "python": "3.11.7",
        "examples": {"train": 100, "held_out": 20, "digest": "feedbeef"},
        "identity": {"data": {"digest": "cafe", "num_files": 1}},
        "command": ["--data-path", DATA],
    }
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "config.toml").write_text('[backend]\ndevices = "cpu"\n[model]\nmodel = "builtin:tiny"\nlora_rank = 2\n')
    evaluated = {"eval_examples": 20, "eval_correct_rate": 0.25, "eval_ci_low": 0.1, "eval_ci_high": 0.4}
    better = evaluated | {"eval_correct_rate": 0.75, "eval_ci_low": 0.6, "eval_ci_high": 0.9}
    records = [{"step": -1, **evaluated}, {"step": 0, "mean_reward": 0.5}, {"step": 2, "mean_reward": 0.6, **better}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))

    def fill(target: Path) -> None:
        weight_OI = load_file(TINY / "model.safetensors")[f"{MODULE}.weight"]
        factors = {"A": torch.ones(2, weight_OI.shape[1]) * 0.02, "B": torch.ones(len(weight_OI), 2) * 0.02}
        tensors = {f"{PREFIX}{MODULE}.lora_{name}.weight": factor for name, factor in factors.items()}
        save_file(tensors, target / "adapter_model.safetensors")
        document = adapter_config(["up_proj"], Lora(rank=2, alpha=4, name=str(TINY)))
        (target / "adapter_config.json").write_text(json.dumps(document))
        (target / "optimizer.safetensors").write_bytes(b"moments")

    state = {"next_step": 3, "metrics": {}, "progress": {"unfinished": None}}
    save_checkpoint(folder / "adapter", "final", fill, state)
    return folder


def ask(command: Any, plugins: Plugins, *arguments: object) -> Result:
    return invoke(command, [str(argument) for argument in arguments], obj=plugins)


def told(result: Result) -> str:
    """What a refused command says."""
    assert result.exception is not None
    assert not isinstance(result.exception, SystemExit), result.output
    return str(result.exception)


def test_merge_writes_a_new_folder_and_nothing_else(run: Path, plugins: Plugins, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "merged"
    export = ("--format", "transformers", "--out")
    result = ask(export_command.command, plugins, run, *export, out, "--dtype", "fp32", "--no-check", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    found = [data[name] for name in ("checkpoint", "dtype", "logit_gap", "is_unchanged")]
    assert found == ["final", "fp32", None, False]
    merged, plain = (load_file(folder / "model.safetensors") for folder in (out, TINY))
    added = merged[f"{MODULE}.weight"] - plain[f"{MODULE}.weight"].float()
    torch.testing.assert_close(added, torch.full_like(added, 2 * 2 * 0.02 * 0.02), atol=1e-6, rtol=1e-3)
    assert not (out / "optimizer.safetensors").exists()
    assert [path.name for path in out.parent.iterdir()] == ["merged"]
    (tmp_path / "file").write_text("mine")
    for taken in (out, tmp_path / "file"):
        refused = ask(export_command.command, plugins, run, *export, taken)
        assert codes_in(told(refused)) == ["export.exists"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_merge_that_ends_early_or_that_no_plugin_makes_leaves_nothing(
    run: Path, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "parent" / "out"
    empty.mkdir(parents=True)

    def stopped(export: ModelExport) -> None:
        (export.out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    exported_by(monkeypatch, plugins, stopped)
    result = ask(export_command.command, plugins, run, "--format", "transformers", "--out", empty)
    assert "Aborted" in result.output
    assert list(empty.parent.rglob("*")) == [empty]
    exported_by(monkeypatch, plugins, lambda export: None)
    message = told(ask(export_command.command, plugins, run, "--format", "transformers", "--out", empty))
    assert "no installed plugin can merge" in message
    assert "retrain-local" in message
    assert list(empty.parent.rglob("*")) == [empty]


def test_vllm_serves_an_adapter_as_it_is(run: Path, plugins: Plugins, tmp_path: Path) -> None:
    result = ask(export_command.command, plugins, run, "--format", "vllm", "--json")
    assert json.loads(result.stdout)["run"].split() == [
        *("vllm", "serve", str(TINY), "--enable-lora", "--max-lora-rank", "8"),
        *("--lora-modules", f"sums={run / 'adapter/final'}"),
    ]
    for form, flags, words in (
        ("gguf", (), "--format gguf needs --out"),
        ("vllm", ("--dtype", "q8_0"), "vllm has no --dtype q8_0"),
        ("gguf", ("--out", str(run / "run.json")), "exists"),
    ):
        assert words in told(ask(export_command.command, plugins, run, "--format", form, *flags))
    file = run / "adapter/final/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))
    adapter = ask(export_command.command, plugins, file.parent.rename(tmp_path / "adapter"), "--format", "vllm")
    assert "vLLM does not serve DoRA" in told(adapter)


def test_a_gguf_export_is_one_file(
    run: Path, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(export: ModelExport) -> ExportedModel:
        assert (export.form, export.dtype, export.base) == ("gguf", "q8_0", "builtin:tiny")
        (export.out / "model.gguf").write_bytes(b"GGUF")
        return ExportedModel(dtype="q8_0", tensors=1, num_bytes=4)

    exported_by(monkeypatch, plugins, write)
    out = tmp_path / "deep" / "sums.gguf"
    (out.parent / ".sums.gguf.folder").mkdir(parents=True)  # of an export that was killed
    (out.parent / ".sums.gguf.folder" / "model.gguf").write_bytes(b"half")
    result = ask(export_command.command, plugins, run, "--format", "gguf", "--dtype", "q8_0", "--out", out)
    assert result.exit_code == 0, result.output
    assert f"llama-cli -m {out}" in result.output
    assert out.read_bytes() == b"GGUF"
    assert [path.name for path in out.parent.iterdir()] == ["sums.gguf"]


def test_a_pushed_folder_tells_what_the_run_was_and_nothing_of_this_machine(
    run: Path, plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"]["data"]["source"] = f"files-{SECRET}"
    (run / "run.json").write_text(json.dumps(manifest))
    out = tmp_path / "folder"
    result = ask(export_command.command, plugins, run, "--push", "me/sums", "--dry-run", "--out", out)
    assert result.exit_code == 0, result.output
    names = ["README.md", "adapter_config.json", "adapter_model.safetensors", "retrain.toml"]
    assert sorted(path.name for path in out.iterdir()) == names
    for path in out.iterdir():
        content = path.read_bytes()
        for hidden in (SECRET, "/home/somebody", str(tmp_path), str(TINY.parent)):
            assert hidden.encode() not in content, f"{path.name} has {hidden}"
    card = (out / "README.md").read_text()
    for words in (
        "`tasks.jsonl`, 100 examples to train on, 20 held out",
        "| hash of the examples | `feedbeef` |",
        "| hash of the data files | `cafe` |",
        "| reward | `match` |",
        "| algorithm | `maxrl+'none'`, loss `ppo` |",
        "| seed | 17 |",
        "| held out | 20 | 25.0% [10.0, 40.0] | 75.0% [60.0, 90.0] |",
        "| set | examples | before training | after 3 steps |",
        "retrain retrain.toml",
        "torch 2.13.0",
        "Licence: that of the base model applies",
    ):
        assert words in card
    assert (out / "retrain.toml").read_text() == repeating_config(manifest).replace(SECRET, secrets.HIDDEN)
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "builtin:tiny"
    refused = ask(export_command.command, plugins, "builtin:tiny", "--push", "me/sums", "--dry-run")
    assert codes_in(told(refused)) == ["export.nothing-to-push"]
    (tmp_path / "file").write_text("mine")
    nowhere = ("--dry-run", "--out", tmp_path / "file" / "folder")
    for arguments, code in ((("me/sums", *nowhere), "not-written"), (("a/b/c",), "bad-repository")):
        assert codes_in(told(ask(export_command.command, plugins, run, "--push", *arguments))) == [f"export.{code}"]


def test_a_push_uploads_the_folder_with_the_stored_token(
    run: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "hf_planted_token_0123456789")
    with hub_server() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        result = ask(export_command.command, plugins, run, "--push", "me/sums", "--private", "--json")
        assert result.exit_code == 0, f"{result.output}{result.exception}"
        assert json.loads(result.stdout)["url"] == f"{hub.url}/me/sums"
        assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"  # by version
        assert hub.tokens == {"Bearer hf_planted_token_0123456789"}
        assert sorted(hub.files) == ["README.md", "adapter_config.json", "adapter_model.safetensors", "retrain.toml"]
        trained = (run / "adapter/final/adapter_model.safetensors").read_bytes()
        assert hub.files["adapter_model.safetensors"] == trained
        assert not any(b"hf_planted" in content for content in hub.files.values())
        hub.status = 403
        message = told(ask(export_command.command, plugins, run, "--push", "me/sums"))
        assert "the upload failed" in message
        assert "hf_planted" not in message
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "hf auth login" in told(ask(export_command.command, plugins, run, "--push", "me/sums"))


def test_only_what_was_set_is_in_the_configuration_that_repeats_a_run() -> None:
    config: Mapping[str, Any] = {
        "data": {"path": "~/private/a.jsonl", "options": {"files": ["/srv/b.jsonl", "Qwen/Qwen3-0.6B"]}},
        "training": {"lr": 0.1, "max_steps": 5},
        "logging": {"log_dir": "logs"},
    }
    origins = dict.fromkeys(("data.path", "data.options", "training.lr", "logging.log_dir"), "a.toml:1")
    text = repeating_config({"config": config, "origins": origins | {"training.max_steps": "default"}, "seed": 3})
    assert text == (
        '[data]\npath = "a.jsonl"\n\n[data.options]\nfiles = [\n    "b.jsonl",\n    "Qwen/Qwen3-0.6B",\n]\n\n'
        "[training]\nlr = 0.1\nseed = 3\n"
    )
