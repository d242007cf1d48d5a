from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MambaConfig

from retrain.api import ConfigError, PluginContext
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.factory import create_backend
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.model.pair import Pair

Make = Callable[..., PluginContext]


@pytest.fixture
def copied(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def refused(context: PluginContext) -> str:
    with pytest.raises(ConfigError) as caught:
        create_backend(context)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "[model] model" in message
    return message


def loaded(context: PluginContext) -> Pair:
    source = find_source(context.config.model.model, KEY, context.plugins)
    return create_pair(context.config, source, trainer_device=torch.device("cpu"), seed=1)


def test_a_folder_loads_in_fp32_with_its_facts(make_context: Make) -> None:
    context = make_context()
    pair = loaded(context)
    assert pair.trained.dtype == pair.sampler.dtype == torch.float32
    assert pair.trained.shape == pair.sampler.shape
    assert pair.trained.shape.context == 512
    assert pair.trained.shape.parameters == pair.total
    assert pair.stop_ids(context.tokenizer) == {500, 501}
    assert pair.stop_ids(None) == {500, 501}
    assert pair.stop_ids(SimpleNamespace(eos_token_id=7)) == {7, 500, 501}
    beyond = SimpleNamespace(eos_token_id=pair.trained.shape.vocabulary)  # a token that the head does not have
    assert pair.stop_ids(beyond) == {500, 501}


def test_stop_ids_of_the_config_where_there_is_no_generation_config(make_context: Make, copied: Path) -> None:
    (copied / "generation_config.json").unlink()
    document = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(document | {"eos_token_id": 9}))
    assert loaded(make_context(copied)).stop_ids(None) == {9}


@pytest.mark.parametrize("damage", ["no JSON", "nonsense"])
def test_a_broken_generation_config(make_context: Make, copied: Path, damage: str) -> None:
    text = "{" if damage == "no JSON" else '{"eos_token_id": "end"}'
    (copied / "generation_config.json").write_text(text)
    assert "cannot be loaded" in refused(make_context(copied))


def test_tensors_may_be_spread_over_files(make_context: Make, copied: Path) -> None:
    whole = loaded(make_context(copied))
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, copied / file)
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    spread = loaded(make_context(copied))
    ids_N, attend = torch.arange(9), PaddedAttend(Spans.apart([9]), torch.device("cpu"))
    with torch.no_grad():
        found, expected = (p.sampler.hidden(ids_N, ids_N, attend) for p in (spread, whole))
    assert torch.equal(found, expected)
    (copied / "model-1.safetensors").unlink()
    assert "model-1.safetensors" in refused(make_context(copied))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"x": "../../elsewhere.safetensors"}}'])
def test_a_broken_index(make_context: Make, copied: Path, text: str) -> None:
    (copied / "model.safetensors.index.json").write_text(text)
    assert "cannot be loaded" in refused(make_context(copied))


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_is_said_to_be_tied_but_is_there(make_context: Make, copied: Path, same: bool) -> None:
    """As transformers reads it: tied if it is the same, and the file's own head if it is not."""
    tensors = load_file(copied / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone() * (1.0 if same else 2.0)
    save_file(tensors | {"lm_head.weight": head}, copied / "model.safetensors", metadata={"format": "pt"})
    pair = loaded(make_context(copied))
    hidden = torch.randn(3, 128)
    torch.testing.assert_close(pair.sampler.logits(hidden), hidden @ head.T)
    plain = AutoModelForCausalLM.from_pretrained(copied)
    if same or transformers.__version__ >= "5":  # before, the file's own head was dropped
        assert torch.equal(plain.lm_head.weight, head)
        frozen = pair.total - sum(p.numel() for p in pair.parameters.values())
        assert frozen == sum(p.numel() for p in plain.parameters())


def test_a_body_without_its_prefix(make_context: Make, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, copied / "model.safetensors", metadata={"format": "pt"})
    assert loaded(make_context(copied)).parameters.keys() == loaded(make_context()).parameters.keys()


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere/at/all", "a b", "a/b/c", "builtin:none"])
def test_no_such_folder(make_context: Make, name: str) -> None:
    refused(make_context(name))


def test_a_file_is_not_a_folder(make_context: Make, copied: Path) -> None:
    assert "is a file" in refused(make_context(copied / "config.json"))


def test_missing_config(make_context: Make, copied: Path) -> None:
    (copied / "config.json").unlink()
    assert "config.json is missing" in refused(make_context(copied))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model_type": "no-such-type"}', '"qwen3"'])
def test_broken_config(make_context: Make, copied: Path, text: str) -> None:
    (copied / "config.json").write_text(text)
    refused(make_context(copied))


def test_config_that_contradicts_the_weights(make_context: Make, copied: Path) -> None:
    document = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(document | {"hidden_size": 64}))
    refused(make_context(copied))


def test_pickled_weights_are_never_read(make_context: Make, copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert "pytorch_model.bin" in refused(make_context(copied))


def test_truncated_weights(make_context: Make, copied: Path) -> None:
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    refused(make_context(copied))


def test_missing_weights_do_not_stay_random(make_context: Make, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert "up_proj" in refused(make_context(copied))


def test_recurrent_state_is_refused_by_name(make_context: Make, copied: Path) -> None:
    document = json.loads((copied / "config.json").read_text())
    kinds = ["linear_attention"] * document["num_hidden_layers"]
    (copied / "config.json").write_text(json.dumps(document | {"layer_types": kinds}))
    assert "linear_attention" in refused(make_context(copied))


def test_a_model_without_attention_is_refused(make_context: Make, tmp_path: Path) -> None:
    MambaConfig(num_hidden_layers=1, hidden_size=8, vocab_size=16).save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "attention layers only" in refused(make_context(tmp_path))


def test_code_of_the_model_is_not_run_unasked(make_context: Make, copied: Path) -> None:
    document = json.loads((copied / "config.json").read_text()) | {
        "model_type": "custom-thing",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (copied / "config.json").write_text(json.dumps(document))
    (copied / "evil.py").write_text("raise SystemExit('ran')\n")
    refused(make_context(copied))


def test_unreachable_hub_is_said_at_once(make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_network(self: object, name: str, **options: object) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    message = refused(make_context("nobody/not-cached-anywhere"))
    assert "hub cannot be reached" in message
    assert asked == ["nobody/not-cached-anywhere"]


def test_console_lines(make_context: Make, model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retrain"):
        create_backend(make_context(rank=4))
    lines = [record.getMessage() for record in caplog.records if record.name == "retrain"]
    assert lines[0] == f"Loading train model: {model_folder} on cpu..."
    rows_and_columns = 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 384))  # q o, k v, gate up down of 4 layers
    assert lines[1].startswith(f"trainable params: {4 * rows_and_columns:,d} || all params: ")
    assert lines[2] == "LocalTrainHelper ready (engine=pytorch, split_mode=False)."
