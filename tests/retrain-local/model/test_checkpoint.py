from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.api import BackendError, LogprobRow, SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.model.checkpoint import MOMENTS
from tests.kit.shared import first_or_long

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]


@pytest.fixture
def saved(make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir()
    backend = make_backend()
    for step in range(2):
        backend.train(roll(backend, requests, step=step))
        backend.publish()
    backend.save(folder)
    return folder


def adapter(backend: LocalBackend, folder: Path) -> bytes:
    folder.mkdir()
    backend.save_adapter(folder)
    return (folder / "adapter_model.safetensors").read_bytes()


def test_a_resumed_step_is_bit_identical(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    (tmp_path / "saved").mkdir()
    straight = make_backend()
    for step in range(2):
        straight.train(roll(straight, requests, step=step))
        straight.publish()
    straight.save(tmp_path / "saved")
    resumed = make_backend(seed=99)
    resumed.load(tmp_path / "saved")
    batches = [roll(backend, requests, step=2) for backend in (straight, resumed)]
    for left, right in zip(batches[0].rows, batches[1].rows, strict=True):
        assert left.tokens_T.tolist() == right.tokens_T.tolist()
        assert left.logprobs_T.tobytes() == right.logprobs_T.tobytes()
    reports = [backend.train(batch) for backend, batch in zip((straight, resumed), batches, strict=True)]
    assert reports[0] == reports[1]
    assert straight.publish() == resumed.publish() == 3
    assert adapter(straight, tmp_path / "a") == adapter(resumed, tmp_path / "b")


def test_a_state_saved_before_any_step_loads(make_backend: MakeBackend, tmp_path: Path) -> None:
    first, second = make_backend(seed=1), make_backend(seed=2)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert second.publish() == 0
    assert adapter(first, tmp_path / "a") == adapter(second, tmp_path / "b")


def test_plain_peft_reads_the_adapter(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, model_folder: Path, tmp_path: Path
) -> None:
    backend = make_backend()
    batch = roll(backend, requests)
    backend.train(batch)
    backend.save_adapter(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(model_folder.resolve())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert config["inference_mode"] is True
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    row = batch.rows[0]
    with torch.no_grad():
        logits = loaded(input_ids=torch.from_numpy(row.tokens_T)[None]).logits[0]
    expected_T = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(row.tokens_T)[1:, None])[:, 0]
    (found_T,) = backend.logprobs([LogprobRow(row.tokens_T, row.action_T)], 1.0)
    np.testing.assert_allclose(found_T[row.action_T], expected_T.numpy()[row.action_T[1:]], atol=1e-4)


def test_a_run_of_the_first_version_goes_on(make_backend: MakeBackend, model_folder: Path, tmp_path: Path) -> None:
    """Before, PEFT and torch.optim.AdamW held what is saved; the files are the same."""
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    settings = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(base, settings)
    named = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-2)
    for p in named.values():
        p.grad = torch.randn_like(p)
    optimizer.step()
    tensors = get_peft_model_state_dict(peft, save_embedding_layers=False)
    save_file({name: t.detach() for name, t in tensors.items()}, tmp_path / "adapter_model.safetensors")
    moments = {f"{name}.{m}": optimizer.state[p][m] for name, p in named.items() for m in MOMENTS}
    save_file(moments, tmp_path / "optimizer.safetensors")
    limits = {"train_tokens": 64, "train_logits": 32768, "cache_tokens": 0}
    state = {"format": 1, "policy_version": 7, "memory_limits": limits}
    (tmp_path / "backend_state.json").write_text(json.dumps(state))
    backend = make_backend(seed=2)
    backend.load(tmp_path)
    assert backend.publish() == 7
    again = tmp_path / "again"
    again.mkdir()
    backend.save(again)
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        before, after = load_file(tmp_path / file), load_file(again / file)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_nothing_is_pickled(saved: Path) -> None:
    assert sorted(file.name for file in saved.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "backend_state.json",
        "optimizer.safetensors",
    ]


def edit(file: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors if tensor is None else tensors | {name: tensor}, file)


def first_name(file: Path) -> str:
    return sorted(load_file(file))[0]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no state": lambda f: (f / "backend_state.json").unlink(),
    "no adapter": lambda f: (f / "adapter_model.safetensors").unlink(),
    "no optimizer": lambda f: (f / "optimizer.safetensors").unlink(),
    "state is not JSON": lambda f: (f / "backend_state.json").write_text("{"),
    "state is a list": lambda f: (f / "backend_state.json").write_text("[]"),
    "later format": lambda f: (f / "backend_state.json").write_text('{"format": 2, "policy_version": 1}'),
    "cut adapter": lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x01\x02"),
    "tensor missing": lambda f: edit(
        f / "adapter_model.safetensors", first_name(f / "adapter_model.safetensors"), None
    ),
    "wrong shape": lambda f: edit(
        f / "adapter_model.safetensors", first_name(f / "adapter_model.safetensors"), torch.zeros(1)
    ),
    "not finite": lambda f: edit(
        f / "adapter_model.safetensors", first_name(f / "adapter_model.safetensors"), torch.full((4, 384), torch.nan)
    ),
    "moment missing": lambda f: edit(f / "optimizer.safetensors", first_name(f / "optimizer.safetensors"), None),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_changes_nothing(
    kind: str, make_backend: MakeBackend, saved: Path, tmp_path: Path
) -> None:
    DAMAGE[kind](saved)
    backend = make_backend()
    before = adapter(backend, tmp_path / "before")
    with pytest.raises(BackendError, match="saved"):
        backend.load(saved)
    assert adapter(backend, tmp_path / "after") == before
    assert backend.publish() == 0


def test_another_rank_is_refused(make_backend: MakeBackend, saved: Path) -> None:
    with pytest.raises(BackendError, match="shape"):
        make_backend(rank=8).load(saved)


@pytest.mark.parametrize("rank", first_or_long([4, 0]))
def test_saved_weights_are_sampled_from_without_their_optimizer(
    rank: int, make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    """As `load` and `publish` would sample, from what `save` and from what `save_adapter` wrote."""
    saved, plain = tmp_path / "saved", tmp_path / "plain"
    backend = make_backend(rank=rank)
    beginning = roll(backend, requests, step=7)
    for step in range(2):
        backend.train(roll(backend, requests, step=step))
        backend.publish()
    for folder, save in ((saved, backend.save), (plain, backend.save_adapter)):
        folder.mkdir()
        save(folder)
    trained = roll(backend, requests, step=7)
    opened = make_backend(rank=rank, seed=99)
    for folder in (saved, plain):
        opened.sample_from(folder)
        assert_same(roll(opened, requests, step=7), trained)
    if rank:
        opened.sample_from(None)
        assert_same(roll(opened, requests, step=7), beginning)
    else:
        with pytest.raises(BackendError, match="base model by its name"):
            opened.sample_from(None)


def assert_same(found: TrainBatch, expected: TrainBatch) -> None:
    for left, right in zip(found.rows, expected.rows, strict=True):
        assert left.tokens_T.tolist() == right.tokens_T.tolist()
        assert left.logprobs_T.tobytes() == right.logprobs_T.tobytes()


def test_weights_that_do_not_fit_change_nothing(make_backend: MakeBackend, saved: Path, tmp_path: Path) -> None:
    backend = make_backend(rank=8)
    before = adapter(backend, tmp_path / "before")
    for folder, why in ((saved, "shape"), (tmp_path / "nowhere", "No such file")):
        with pytest.raises(BackendError, match=why):
            backend.sample_from(folder)
    assert adapter(backend, tmp_path / "after") == before
