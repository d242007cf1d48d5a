"""Adapters as PEFT makes, names and reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.api import BackendError, ConfigError
from retrain_local.backend import LocalBackend
from retrain_local.checks import adapter_kind_problems, quantize_problems, start_problems
from retrain_local.model.checkpoint import MOMENTS, save_adapter
from retrain_local.model.qlora import KINDS
from tests.kit.local_backend import Local, check_resumes, check_same_rows, saved
from tests.kit.local_pairs import check_peft_agrees, relative, shake
from tests.kit.problems import codes_in
from tests.kit.random_models import random_model
from tests.kit.shared import first_or_long


def with_peft(folder: Path, *, rank: int, alpha: int, seed: int) -> Any:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder.resolve())}
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(base, config).eval()


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_a_seed_draws_what_peft_draws(model_folder: Path, local: Local, rank: int) -> None:
    peft = with_peft(model_folder, rank=rank, alpha=rank, seed=11)
    expected = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    pair = local.pair(model_folder, rank=rank, seed=11)
    assert torch.equal(torch.get_rng_state(), before)
    assert pair.parameters.keys() == expected.keys()
    for name, p in pair.parameters.items():
        assert p.dtype == torch.float32
        assert torch.equal(p, expected[name])
        assert bool(p.any()) == (".lora_A." in name)
    other = local.pair(model_folder, rank=rank, seed=12)
    assert any(not torch.equal(p, other.parameters[name]) for name, p in pair.parameters.items())


@pytest.mark.parametrize(("alpha", "expected"), [(0, 8), (5, 5)])
def test_the_config_is_pefts(model_folder: Path, local: Local, tmp_path: Path, alpha: int, expected: int) -> None:
    save_adapter(local.pair(model_folder, alpha=alpha), tmp_path)
    peft = with_peft(model_folder, rank=4, alpha=expected, seed=0)
    wanted = peft.peft_config["default"].to_dict() | {"inference_mode": True}
    found = LoraConfig.from_pretrained(str(tmp_path)).to_dict()
    leaves = {name.rpartition(".")[2] for name in wanted["target_modules"]}  # PEFT shortens them for many layers
    assert {**found, "target_modules": set(found["target_modules"])} == {**wanted, "target_modules": leaves}
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    assert document["target_modules"] == sorted(document["target_modules"])
    assert document["lora_alpha"] == expected


@pytest.mark.parametrize("kind", ["rslora", "dora"])
@pytest.mark.usefixtures("merge_limit")
def test_logits_and_gradients_are_those_of_peft(kind: str, local: Local, tmp_path: Path) -> None:
    model = random_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    pair = local.pair(tmp_path / "model", lora={kind: True})
    shake(pair)
    names = check_peft_agrees(pair, model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["use_rslora"], written["use_dora"]) == (kind == "rslora", kind == "dora")
    assert any("magnitude" in name for name in names) == (kind == "dora")


@pytest.mark.parametrize("keys", [{"lora": {"rslora": True}}, {"lora": {"dora": True}}, {"quantize": "int8"}])
def test_a_step_is_on_policy_and_resumes(keys: dict[str, Any], local: Local, tmp_path: Path) -> None:
    first, resumed = local.make(**keys), local.make(**keys, seed=99)
    first.train(local.roll(first))
    first.publish()
    first.save(tmp_path)
    resumed.load(tmp_path)
    rows = local.roll(first, step=1).rows
    for row, found_T in zip(rows, resumed.logprobs(rows, 1.0), strict=True):
        assert np.abs(found_T - row.logprobs_T)[row.action_T].max() < 1e-4


def test_what_would_scale_otherwise_is_refused(local: Local, tmp_path: Path) -> None:
    asked = {"rslora": True, "dora": True}
    config = local.context(lora=asked, quantize="int8", inference={"engine": "sglang"}).config
    found = [problem.code for problem in adapter_kind_problems(config)]
    assert found == ["engine.adapter-kind", "engine.adapter-kind", "model.dora-quantised"]
    assert adapter_kind_problems(local.context(inference={"engine": "sglang"}).config) == []
    document = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    found = [problem.fix for problem in start_problems(local.context(lora=asked, adapter=tmp_path).config)]
    assert found == ["set rslora = false", "set dora = false"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(document | {"use_rslora": True}))
    assert [problem.fix for problem in start_problems(local.context(adapter=tmp_path).config)] == ["set rslora = true"]
    assert start_problems(local.context(lora={"rslora": True}, adapter=tmp_path).config) == []


LARGEST_GAP = {"nf4": 0.15, "int8": 0.01}  # of the norm of a matrix


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.usefixtures("merge_limit")
def test_gradients_are_those_of_peft_on_the_rounded_model(kind: str, local: Local, tmp_path: Path) -> None:
    """And its sampler agrees, with a copy of what it expands (small models), and without."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    model = random_model("qwen3 with windows and biases")
    model.save_pretrained(tmp_path / "model")
    pair = local.pair(tmp_path / "model", quantize=kind)
    shake(pair)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            rounded = KINDS[kind](module.weight.detach()).expanded(torch.float32)
            assert 0.0 < relative(rounded, module.weight.detach()) < LARGEST_GAP[kind]
            module.weight.data.copy_(rounded)
    check_peft_agrees(pair, model, tmp_path / "adapter")


def test_it_is_refused_where_it_cannot_be(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain_local.checks.find_spec", lambda name: None)
    inference = {"engine": "vllm"}
    found = quantize_problems(local.context(rank=0, quantize="nf4", inference=inference).config)
    codes = ["model.needs-bitsandbytes", "model.quantised-training", "engine.not-quantised"]
    assert [problem.code for problem in found] == codes
    assert quantize_problems(local.context(rank=0, inference=inference).config) == []
    computed = local.context(quantize="nf4").config
    assert len(quantize_problems(computed)) == 1
    assert quantize_problems(computed, will_run=False) == [], "retrain capacity only computes"
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local.pair(tmp_path, quantize="int8")
    assert codes_in(caught) == ["model.not-quantisable"]


ADAPTER, OPTIMIZER, STATE = "adapter_model.safetensors", "optimizer.safetensors", "backend_state.json"


def adapter_bytes(backend: LocalBackend, folder: Path) -> bytes:
    return (saved(folder, backend.save_adapter) / ADAPTER).read_bytes()


def test_an_adapter_resumes_bit_identical_and_nothing_is_pickled(local: Local, tmp_path: Path) -> None:
    straight, resumed = local.trained(2), local.make(seed=99)
    folder = saved(tmp_path / "saved", straight.save)
    assert {file.name for file in folder.iterdir()} == {ADAPTER, OPTIMIZER, STATE, "adapter_config.json"}
    resumed.load(folder)
    check_resumes(local, straight, resumed, 2)


def test_a_state_saved_before_any_step_loads(local: Local, tmp_path: Path) -> None:
    first, second = local.make(seed=1), local.trained(seed=2)
    second.load(saved(tmp_path / "saved", first.save))
    assert second.publish() == 0
    assert not second._trainer.optimizer.state, "no moments are left of the steps before"
    assert adapter_bytes(first, tmp_path / "a") == adapter_bytes(second, tmp_path / "b")


def test_a_run_of_the_first_version_continues(local: Local, model_folder: Path, tmp_path: Path) -> None:
    """Before, PEFT and torch.optim.AdamW held the state; the files are the same."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(base, settings)
    named = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    for p in named.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    tensors = get_peft_model_state_dict(peft, save_embedding_layers=False)
    save_file({name: t.detach() for name, t in tensors.items()}, tmp_path / ADAPTER)
    moments = {f"{name}.{m}": optimizer.state[p][m] for name, p in named.items() for m in MOMENTS}
    save_file(moments, tmp_path / OPTIMIZER)
    limits = {"train_tokens": 64, "train_logits": 32768, "cache_tokens": 0}
    (tmp_path / STATE).write_text(json.dumps({"format": 1, "policy_version": 7, "memory_limits": limits}))
    backend = local.make(seed=2)
    backend.load(tmp_path)
    assert backend.publish() == 7
    again = saved(tmp_path / "again", backend.save)
    for file in (ADAPTER, OPTIMIZER):
        before, after = load_file(tmp_path / file), load_file(again / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def edited(file: str, tensor: torch.Tensor | None) -> Callable[[Path], object]:
    """Damage that replaces the first tensor of a file, or removes it."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / file)
        name = sorted(tensors)[0]
        tensors.pop(name)
        save_file(tensors if tensor is None else tensors | {name: tensor}, folder / file)

    return edit


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no state": lambda f: (f / STATE).unlink(),
    "no adapter_bytes": lambda f: (f / ADAPTER).unlink(),
    "no optimizer": lambda f: (f / OPTIMIZER).unlink(),
    "state is not JSON": lambda f: (f / STATE).write_text("{"),
    "state is a list": lambda f: (f / STATE).write_text("[]"),
    "later format": lambda f: (f / STATE).write_text('{"format": 2, "policy_version": 1}'),
    "cut adapter_bytes": lambda f: (f / ADAPTER).write_bytes(b"\x01\x02"),
    "tensor missing": edited(ADAPTER, None),
    "wrong shape": edited(ADAPTER, torch.zeros(1)),
    "not finite": edited(ADAPTER, torch.full((4, 128), torch.nan)),
    "moment missing": edited(OPTIMIZER, None),
}


def test_a_damaged_or_foreign_checkpoint_changes_nothing(local: Local, trained_folder: Path, tmp_path: Path) -> None:
    backend, other = local.make(), local.make(rank=8)
    before = [adapter_bytes(each, tmp_path / name) for each, name in ((backend, "before"), (other, "other"))]
    for kind, damage in DAMAGE.items():
        folder = Path(shutil.copytree(trained_folder, tmp_path / kind))
        damage(folder)
        with pytest.raises(BackendError, match=kind) as caught:
            backend.load(folder)
        assert codes_in(caught) == ["checkpoint.unusable"]
    for folder, load in ((trained_folder, other.load), (trained_folder, other.sample_from), (tmp_path, other.load)):
        with pytest.raises(BackendError) as caught:
            load(folder)
        assert codes_in(caught) == ["checkpoint.unusable"]
    assert [adapter_bytes(backend, tmp_path / "after"), adapter_bytes(other, tmp_path / "other after")] == before
    assert backend.publish() == 0


@pytest.mark.parametrize("rank", first_or_long([4, 0]))
def test_saved_weights_are_sampled_from_without_their_optimizer(rank: int, local: Local, tmp_path: Path) -> None:
    """As `load` and `publish` would sample, from the files of `save` and of `save_adapter`."""
    backend, opened = local.make(rank=rank), local.make(rank=rank, seed=99)
    beginning = local.roll(backend, step=7)
    backend.train(local.roll(backend))
    backend.publish()
    trained = local.roll(backend, step=7)
    for name, save in (("saved", backend.save), ("plain", backend.save_adapter)):
        opened.sample_from(saved(tmp_path / name, save))
        check_same_rows(local.roll(opened, step=7), trained)
    if rank:
        opened.sample_from(None)
        check_same_rows(local.roll(opened, step=7), beginning)
    else:
        with pytest.raises(BackendError) as caught:
            opened.sample_from(None)
        assert codes_in(caught) == ["checkpoint.base-not-kept"]
