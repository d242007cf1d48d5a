from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.api import BackendError
from retrain_local.backend import LocalBackend
from retrain_local.model.checkpoint import MOMENTS
from tests.kit.local_backend import Local, check_same_rows, saved
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

ADAPTER, OPTIMIZER, STATE = "adapter_model.safetensors", "optimizer.safetensors", "backend_state.json"


def adapter(backend: LocalBackend, folder: Path) -> bytes:
    return (saved(folder, backend.save_adapter) / ADAPTER).read_bytes()


def test_a_resumed_step_is_bit_identical_and_nothing_is_pickled(local: Local, tmp_path: Path) -> None:
    straight, resumed = local.trained(2), local.make(seed=99)
    folder = saved(tmp_path / "saved", straight.save)
    assert {file.name for file in folder.iterdir()} == {ADAPTER, OPTIMIZER, STATE, "adapter_config.json"}
    resumed.load(folder)
    batches = [local.roll(backend, step=2) for backend in (straight, resumed)]
    check_same_rows(*batches)
    reports = [backend.train(batch) for backend, batch in zip((straight, resumed), batches, strict=True)]
    assert reports[0] == reports[1]
    assert straight.publish() == resumed.publish() == 3
    assert adapter(straight, tmp_path / "a") == adapter(resumed, tmp_path / "b")


def test_a_state_saved_before_any_step_loads(local: Local, tmp_path: Path) -> None:
    first, second = local.make(seed=1), local.trained(seed=2)
    second.load(saved(tmp_path / "saved", first.save))
    assert second.publish() == 0
    assert not second._trainer.optimizer.state, "no moments are left of the steps before"
    assert adapter(first, tmp_path / "a") == adapter(second, tmp_path / "b")


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
    "no adapter": lambda f: (f / ADAPTER).unlink(),
    "no optimizer": lambda f: (f / OPTIMIZER).unlink(),
    "state is not JSON": lambda f: (f / STATE).write_text("{"),
    "state is a list": lambda f: (f / STATE).write_text("[]"),
    "later format": lambda f: (f / STATE).write_text('{"format": 2, "policy_version": 1}'),
    "cut adapter": lambda f: (f / ADAPTER).write_bytes(b"\x01\x02"),
    "tensor missing": edited(ADAPTER, None),
    "wrong shape": edited(ADAPTER, torch.zeros(1)),
    "not finite": edited(ADAPTER, torch.full((4, 128), torch.nan)),
    "moment missing": edited(OPTIMIZER, None),
}


def test_a_damaged_or_foreign_checkpoint_changes_nothing(local: Local, trained_folder: Path, tmp_path: Path) -> None:
    backend, other = local.make(), local.make(rank=8)
    before = [adapter(each, tmp_path / name) for each, name in ((backend, "before"), (other, "other"))]
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
    assert [adapter(backend, tmp_path / "after"), adapter(other, tmp_path / "other after")] == before
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
