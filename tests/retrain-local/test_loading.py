from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.api import ConfigError, load_plugins
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Source
from retrain_local.model.pair import Pair
from tests.kit.causal_types import small_model
from tests.kit.local_backend import Local
from tests.kit.problems import codes_in

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def copied(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def refused(local: Local, model: Path | str, code: str) -> str:
    with pytest.raises(ConfigError) as caught:
        local.pair(model)
    assert caught.value.exit_code == 2
    assert codes_in(caught) == [f"model.{code}"]
    assert "[model] model" in str(caught.value)
    return str(caught.value)


def change(folder: Path, **values: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | values))


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(edit(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def test_a_folder_loads_in_fp32_with_its_facts(local: Local, copied: Path) -> None:
    pair = local.pair()
    assert pair.trained.dtype == pair.sampler.dtype == torch.float32
    assert pair.trained.shape == pair.sampler.shape
    assert pair.trained.shape.context == 512
    assert pair.trained.shape.parameters == pair.total
    assert pair.stop_ids(None) == {500, 501}
    assert pair.stop_ids(SimpleNamespace(eos_token_id=7)) == {7, 500, 501}
    beyond = SimpleNamespace(eos_token_id=pair.trained.shape.vocabulary)  # a token that the head does not have
    assert pair.stop_ids(beyond) == {500, 501}
    (copied / "generation_config.json").unlink()
    change(copied, eos_token_id=9)
    assert local.pair(copied).stop_ids(None) == {9}


def spread(folder: Path, parts: int) -> None:
    """The tensors of a folder in so many files, with their index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = {name: f"model-{number % parts}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def test_tensors_may_be_spread_over_files_and_lack_a_prefix(local: Local, copied: Path) -> None:
    whole = local.pair(copied)
    rewrite(copied, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    bare = local.pair(copied)
    spread(copied, 3)
    in_files = local.pair(copied)
    assert bare.parameters.keys() == whole.parameters.keys()
    ids_N, attend = torch.arange(9), PaddedAttend(Spans.apart([9]), torch.device("cpu"))
    with torch.no_grad():
        expected, *others = (p.sampler.hidden(ids_N, ids_N, attend) for p in (whole, bare, in_files))
    assert all(torch.equal(found, expected) for found in others)
    (copied / "model-1.safetensors").unlink()
    assert "model-1.safetensors" in refused(local, copied, "not-loadable")


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_is_said_to_be_tied_but_is_there(local: Local, copied: Path, same: bool) -> None:
    """As transformers reads it: tied if it is the same, and the file's own head if it is not."""
    head = load_file(copied / WEIGHTS)["model.embed_tokens.weight"].clone() * (1.0 if same else 2.0)
    rewrite(copied, lambda tensors: tensors | {"lm_head.weight": head})
    pair, hidden = local.pair(copied), torch.randn(3, head.shape[1])
    torch.testing.assert_close(pair.sampler.logits(hidden), hidden @ head.T)
    plain = AutoModelForCausalLM.from_pretrained(copied)
    if same or transformers.__version__ >= "5":  # before, the file's own head was dropped
        assert torch.equal(plain.lm_head.weight, head)
        frozen = pair.total - sum(p.numel() for p in pair.parameters.values())
        assert frozen == sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere/at/all", "a b", "a/b/c"])
def test_no_such_folder(local: Local, name: str) -> None:
    refused(local, name, "no-such-folder")


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        *(("config.json", text, "bad-config-json") for text in ("", "{", "[]", "{}", '"qwen3"', "[" * 100_000)),
        ("config.json", None, "incomplete-folder"),
        ("config.json", '{"model_type": "no-such-type"}', "not-loadable"),
        *((INDEX, text, "not-loadable") for text in ("{", "[]", '{"weight_map": {"x": "../../a.safetensors"}}')),
        *(("generation_config.json", text, "not-loadable") for text in ("{", '{"eos_token_id": "end"}')),
        (WEIGHTS, "cut off", "not-loadable"),
        (WEIGHTS, None, "no-safetensors"),
    ],
)
def test_a_broken_or_absent_file_is_refused(local: Local, copied: Path, file: str, text: str | None, code: str) -> None:
    if text is None:
        (copied / file).unlink()
    else:
        (copied / file).write_text(text)
    refused(local, copied, code)


def test_weights_that_contradict_the_configuration_are_refused_by_name(local: Local, copied: Path) -> None:
    change(copied, hidden_size=32)
    assert "config.json says" in refused(local, copied, "not-loadable")
    change(copied, hidden_size=64)
    rewrite(copied, lambda tensors: {name: t for name, t in tensors.items() if "1.mlp.up_proj" not in name})
    assert "up_proj" in refused(local, copied, "not-loadable")
    refused(local, copied / "config.json", "not-a-folder")
    (copied / WEIGHTS).rename(copied / "pytorch_model.bin")
    assert "pytorch_model.bin" in refused(local, copied, "no-safetensors")


def test_code_of_the_model_is_run_only_on_request(local: Local, copied: Path) -> None:
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    change(copied, model_type="custom-thing", auto_map=classes)
    (copied / "evil.py").write_text("raise SystemExit('ran')\n")
    refused(local, copied, "needs-its-code")


def test_an_unreachable_hub_is_reported_at_once(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_network(self: object, name: str, **options: object) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    refused(local, "nobody/not-cached-anywhere", "hub-unreachable")
    assert asked == ["nobody/not-cached-anywhere"]


NAME = "somebody/something"


def test_a_cached_model(local: Local, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the hub's own client leaves it on disk."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    repository, revision = tmp_path / f"models--{NAME.replace('/', '--')}", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    snapshot = Path(shutil.copytree(model_folder, repository / "snapshots" / revision))

    def cached() -> Pair:
        source = Source(path=NAME, offline=True)
        return create_pair(local.context(NAME).config, source, trainer_device=torch.device("cpu"), seed=1)

    pair = cached()
    assert pair.stop_ids(None) == {500, 501}
    assert pair.adapter_config["base_model_name_or_path"] == NAME
    (snapshot / "generation_config.json").unlink()
    assert cached().stop_ids(None) == frozenset()
    spread(snapshot, 2)
    assert cached().trained.shape.layers == 2
    for missing, said in (
        ("model-1.safetensors", NAME),
        (INDEX, "cannot be loaded"),
        ("config.json", "cannot be loaded"),
    ):
        (snapshot / missing).unlink()
        with pytest.raises(ConfigError, match=said):
            cached()


@pytest.mark.slow
def test_a_model_of_transformers_loads_without_a_word_about_kernels_that_it_does_not_use(tmp_path: Path) -> None:
    small_model("gpt2").save_pretrained(tmp_path)
    code = f"""
import torch
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Source
from retrain_local.options import ModelKeys
from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Config
Model = type("Model", (schema.ModelTable, ModelKeys), {{}})
tables = {{"model": Model(model={str(tmp_path)!r}), "lora": schema.LoraTable()}}
source = Source(path={str(tmp_path)!r}, offline=True)
create_pair(Config(tables=tables), source, trainer_device=torch.device("cpu"), seed=1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_builtin_model_is_a_folder_and_other_names_are_left_to_others() -> None:
    plugins = load_plugins()
    assert (Path(str(plugins.locate_model("builtin:tiny"))) / WEIGHTS).is_file()
    assert plugins.locate_model("Qwen/Qwen3-0.6B") is None
    with pytest.raises(ConfigError, match="builtin:tiny"):
        plugins.locate_model("builtin:tny")
