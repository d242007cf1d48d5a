"""The folder of a trainer: weights that come back, steps it was sent, and its adapter under PEFT's names."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file

from retrain.api import BackendError, ConfigError
from retrain_prime_rl import trainer_folder
from retrain_prime_rl.trainer_folder import (
    LEDGER,
    answer_offers,
    copy_adapter,
    last_needless,
    newest_broadcast,
    record,
    wait_for,
)
from retrain_prime_rl.transport import rank_files

ADAPTER = save({"lora_A": np.ones((4, 8), np.float32), "lora_B": np.zeros((8, 4), np.float32)})
MODULE = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
NAMES = rank_files(2)
WAIT = {"wait_s": 20.0, "poll_s": 0.01}


# ---------------------------------------------------------------- weights that come back


def newest_step(folder: Path) -> int | None:
    newest = newest_broadcast(folder).newest
    return None if newest is None else newest.step


def test_the_newest_complete_one_counts_by_number_not_by_name(tmp_path, broadcast):
    assert newest_step(tmp_path) is None
    for name in ("step_x", "step_", "step_-1", "checkpoint_5", "step_٣"):
        (tmp_path / "broadcasts" / name).mkdir(parents=True)
        (tmp_path / "broadcasts" / name / "STABLE").touch()
    (tmp_path / "broadcasts" / "step_4").write_text("a file")
    assert newest_step(tmp_path) is None
    for step in (2, 9, 10):
        broadcast(tmp_path, step)
    broadcast(tmp_path, 11, stable=False)
    (broadcast(tmp_path, 12) / "adapter_model.safetensors").unlink()
    status = newest_broadcast(tmp_path)
    assert "adapter_model.safetensors" in status.faults[0]
    newest = status.newest
    assert (newest.step, newest.is_adapter) == (10, True)
    assert newest.folder == tmp_path / "broadcasts" / "step_10"


@pytest.mark.parametrize(
    ("weights", "config", "fault"),
    [
        (ADAPTER[:-1], "{}", "bytes and should have"),
        (ADAPTER + b"x", "{}", "bytes and should have"),
        (ADAPTER[:40], "{}", "JSONDecodeError"),
        (b"", "{}", "no safetensors header"),
        (b"\xff" * 64, "{}", "no safetensors header"),
        (ADAPTER, "{", "JSONDecodeError"),
        (ADAPTER, "[]", "is not a JSON object"),
        (ADAPTER, "\x00", "JSONDecodeError"),
    ],
)
def test_a_torn_one_is_named_and_the_one_before_it_found(tmp_path, broadcast, weights, config, fault):
    broadcast(tmp_path, 1)
    torn = broadcast(tmp_path, 2, weights=weights, config=config)
    status = wait_for(tmp_path, 2, wait_s=0.02, poll_s=0.01)
    assert status.newest.step == 1
    (told,) = status.faults
    assert str(torn) in told
    assert fault in told


def test_an_offer_is_answered_and_its_weights_count_once_they_are_finished(tmp_path, broadcast):
    """The handshake of trainers that write nothing before somebody has answered."""

    def train() -> None:
        for step in (0, 1):
            target = tmp_path / "broadcasts" / f"step_{step}"
            target.mkdir(parents=True)
            (target / ".sender_ready").touch()
            while not (target / ".receiver_ready").exists() and not given_up.wait(0.005):
                pass
            (target / ".started").touch()
            seen.append(newest_broadcast(tmp_path).newest)
            broadcast(tmp_path, step, stable=False)
            (target / ".finished").touch()

    seen: list[Any] = []
    given_up = threading.Event()
    trainer = threading.Thread(target=train)
    trainer.start()
    status = wait_for(tmp_path, 1, **WAIT)
    given_up.set()
    trainer.join()
    assert (status.newest.step, seen[0], seen[1].step) == (1, None, 0)
    target = broadcast(tmp_path, 5)
    answer_offers(tmp_path)
    assert not (target / ".receiver_ready").exists(), "it was not offered"


def test_all_weights_may_be_spread_over_files_and_each_is_checked(tmp_path, broadcast):
    target = tmp_path / "broadcasts" / "step_1"
    target.mkdir(parents=True)
    (target / "STABLE").touch()
    assert "no safetensors file" in newest_broadcast(tmp_path).faults[0]
    for number in (1, 2):
        (target / f"model-0000{number}-of-00002.safetensors").write_bytes(ADAPTER)
    newest = newest_broadcast(tmp_path).newest
    assert not newest.is_adapter
    (target / "model-00002-of-00002.safetensors").write_bytes(ADAPTER[:-4])
    assert "model-00002" in newest_broadcast(tmp_path).faults[0]


@pytest.mark.parametrize(
    "torn", [{"stable": False}, {"stable": False, "weights": ADAPTER[:50], "config": "{"}, {"weights": ADAPTER[:50]}]
)
def test_the_weights_of_a_step_are_waited_for_until_they_are_whole(tmp_path, broadcast, torn):
    broadcast(tmp_path, 1)
    target, looks = broadcast(tmp_path, 2, **torn), []
    threading.Timer(0.2, lambda: broadcast(tmp_path, 2)).start()
    status = wait_for(tmp_path, 2, **WAIT, meanwhile=lambda: looks.append(1))
    assert status.newest.step == 2
    assert (target / "adapter_model.safetensors").read_bytes() != torn.get("weights")
    assert len(looks) > 1


def test_later_weights_will_do_and_their_header_is_read_without_the_tensors(tmp_path, broadcast):
    header = json.dumps({"big": {"dtype": "F32", "shape": [2**28], "data_offsets": [0, 2**30]}}).encode()
    target = broadcast(tmp_path, 7, weights=len(header).to_bytes(8, "little") + header)
    with (target / "adapter_model.safetensors").open("r+b") as stream:
        stream.truncate(8 + len(header) + 2**30)  # a hole: takes no disk
    assert wait_for(tmp_path, 5, wait_s=0.0, poll_s=0.01).newest.step == 7


# ---------------------------------------------------------------- steps that were sent, counted from 1


def find_sent(folder: Path, *, first_step: int = -1, resumes: bool = False) -> int:
    return trainer_folder.find_sent(folder, NAMES, first=1, first_step=first_step, resumes=resumes)


def rollout(folder: Path, step: int, names: tuple[str, ...] = NAMES) -> None:
    target = folder / "rollouts" / f"step_{step}"
    target.mkdir(parents=True)
    for name in names:
        (target / name).write_bytes(b"x")


def checkpoint(folder: Path, step: int, *, complete: bool = True) -> None:
    target = folder / "checkpoints" / f"step_{step}" / "trainer"
    target.mkdir(parents=True)
    if complete:
        (target / ".metadata").touch()


def test_a_new_folder_begins_at_none_with_or_without_a_trainer_that_waits(tmp_path, broadcast):
    assert find_sent(tmp_path) == find_sent(tmp_path, resumes=True) == 0
    broadcast(tmp_path, 0)  # written when a trainer starts
    assert find_sent(tmp_path) == find_sent(tmp_path, resumes=True) == 0


def test_a_resumed_run_goes_on_after_the_last_batch(tmp_path, broadcast):
    for step in (1, 2, 10, 9):
        rollout(tmp_path, step)
    broadcast(tmp_path, 8)
    (tmp_path / "rollouts" / ".step_11.tmp").mkdir()  # of a killed writer
    assert find_sent(tmp_path, resumes=True) == 10
    for step in (0, 1):
        rollout(tmp_path / "older wire", step)
    assert trainer_folder.find_sent(tmp_path / "older wire", NAMES, first=0, resumes=True) == 2


def test_over_a_socket_ledger_and_weights_tell(tmp_path, broadcast):
    record(tmp_path, 4)
    assert find_sent(tmp_path, resumes=True) == 4
    broadcast(tmp_path, 6)
    broadcast(tmp_path, 8, stable=False)
    assert find_sent(tmp_path, resumes=True) == 6


def test_a_new_run_does_not_go_on_in_the_folder_of_another(tmp_path, broadcast):
    for number, leave in enumerate((rollout, broadcast, record)):
        folder = tmp_path / str(number)
        folder.mkdir()
        leave(folder, 1)
        with pytest.raises(ConfigError, match=rf"(?s){folder}.*first_step = 2"):
            find_sent(folder)


def test_first_step_takes_over_where_a_former_life_of_the_trainer_left_nothing_later(tmp_path, broadcast):
    rollout(tmp_path / "sent", 5)
    broadcast(tmp_path / "sent", 5)
    assert find_sent(tmp_path / "sent", first_step=6) == 5
    broadcast(tmp_path / "trained", 9)
    for folder in tmp_path.iterdir():
        with pytest.raises(ConfigError, match="checkpoint of step 4 and remove the files of later steps"):
            find_sent(folder, first_step=5, resumes=True)


def test_a_step_without_all_its_files_is_a_hole_unless_the_trainer_has_read_it(tmp_path, broadcast):
    for step in (3, 5):
        rollout(tmp_path, step)
    broadcast(tmp_path, 3)
    with pytest.raises(ConfigError, match="step_4"):
        find_sent(tmp_path, resumes=True)
    broadcast(tmp_path, 4)
    assert find_sent(tmp_path, resumes=True) == 5
    rollout(tmp_path, 6, ("rank_0.bin",))
    with pytest.raises(ConfigError, match=r"(?s)step_6.*rank_1\.bin"):
        find_sent(tmp_path, resumes=True)


def test_a_trainer_that_was_put_back_behind_what_lies_there_is_told(tmp_path, broadcast):
    for step in (4, 5):
        rollout(tmp_path, step)
        broadcast(tmp_path, step)
    broadcast(tmp_path, 2)  # its checkpoint of step 2, written after the others
    for step in (4, 5):
        os.utime(tmp_path / "broadcasts" / f"step_{step}" / "STABLE", ns=(step, step))
    with pytest.raises(ConfigError) as caught:
        find_sent(tmp_path, resumes=True)
    assert "put back to step 2" in str(caught.value)
    assert "first_step = 3" in str(caught.value)


@pytest.mark.parametrize(("checkpoints", "needless"), [([], 8), ([4], 4), ([4, 6], 6), ([9], 8), ([2, 3], 3)], ids=str)
def test_batches_are_kept_from_the_newest_checkpoint_on(tmp_path, checkpoints, needless):
    for step in checkpoints:
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 7, complete=False)  # being written
    assert last_needless(tmp_path, 9) == needless
    assert last_needless(tmp_path, 0) == 0


def test_a_trainer_that_would_not_look_into_the_folder_is_refused(tmp_path):
    trainer_folder.refuse_other_trainer(tmp_path, "per_token")
    file = tmp_path / "run_one" / "control" / "orch.toml"
    file.parent.mkdir(parents=True)
    with pytest.raises(ConfigError, match="does not look for batches"):
        trainer_folder.refuse_other_trainer(tmp_path / "run_one", "scalar")
    file.touch()
    trainer_folder.refuse_other_trainer(tmp_path / "run_one", "scalar")
    with pytest.raises(ConfigError, match="does not look for batches"):
        trainer_folder.refuse_other_trainer(tmp_path, "scalar")
    default = tmp_path / "run_default" / "control" / "orch.toml"
    default.parent.mkdir(parents=True)
    default.touch()
    with pytest.raises(ConfigError, match=r"PRIME-RL 0\.8\.0 or earlier"):
        trainer_folder.refuse_other_trainer(tmp_path, "per_token")


def test_the_ledger_is_replaced_whole_and_a_damaged_one_is_named_with_the_way_out(tmp_path):
    for step in range(3):
        record(tmp_path, step)
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER]
    for text in ("", "{", "[]", '{"steps_sent": "many"}', "{}"):
        (tmp_path / LEDGER).write_text(text)
        with pytest.raises(ConfigError, match="set first_step"):
            find_sent(tmp_path, resumes=True)


# ---------------------------------------------------------------- its adapter under PEFT's names


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    return folder


def written(folder: Path, *, module: str = MODULE, b: float = 1.0, width: int = 8) -> Path:
    """An adapter as the trainer broadcasts it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    factors = {
        f"{module}.lora_A.weight": np.arange(4 * width, dtype=np.float32).reshape(4, width) / (4 * width),
        f"{module}.lora_B.weight": np.full((width, 4), b, np.float32),
    }
    save_file(factors, folder / "adapter_model.safetensors")
    return folder


def base(folder: Path, name: str = f"{MODULE}.weight") -> str:
    folder.mkdir()
    save_file({name: np.zeros((8, 8), np.float32)}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("prefix", ["", "base_model.model."])
def test_names_get_the_prefix_once_and_the_numbers_stay(tmp_path, target, prefix):
    source = written(tmp_path / "source", module=prefix + MODULE)
    copy_adapter(source, target, base(tmp_path / "base"))
    theirs = load_file(source / "adapter_model.safetensors")
    ours = load_file(target / "adapter_model.safetensors")
    assert sorted(ours) == [f"base_model.model.{MODULE}.lora_{side}.weight" for side in "AB"]
    for name, tensor in ours.items():
        assert (tensor == theirs[prefix + name.removeprefix("base_model.model.")]).all()
    assert json.loads((target / "adapter_config.json").read_text()) == CONFIG


def test_an_adapter_that_fits_no_module_is_refused_once_it_has_values(tmp_path, target):
    model, trained = base(tmp_path / "base", "transformer.wte.weight"), written(tmp_path / "trained")
    copy_adapter(written(tmp_path / "new", b=0.0), target, model)  # as it was created
    with pytest.raises(BackendError, match="would change nothing in PEFT"):
        copy_adapter(trained, target, model)
    copy_adapter(trained, target, "nobody/no-such-model")  # which cannot be compared
    assert (target / "adapter_model.safetensors").is_file()
    of_images = written(tmp_path / "source", module="model.language_model.layers.0.self_attn.q_proj")
    copy_adapter(of_images, target, base(tmp_path / "images", f"language_model.{MODULE}.weight"))
    for content in ({}, {"model.norm.weight": np.ones(3, np.float32)}):
        save_file(content, trained / "adapter_model.safetensors")
        with pytest.raises(BackendError, match="would change nothing"):
            copy_adapter(trained, target, model)


def test_peft_applies_what_was_copied(tmp_path, target):
    pytest.importorskip("retrain_local", reason="the tiny model comes with retrain-local")
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from retrain_local.plugin import BUILTIN_MODELS

    tiny, source = str(BUILTIN_MODELS["tiny"]), written(tmp_path / "source", width=128)
    (source / "adapter_config.json").write_text(json.dumps(CONFIG | {"layers_to_transform": [0]}), encoding="utf-8")
    copy_adapter(source, target, tiny)
    model, prompt = AutoModelForCausalLM.from_pretrained(tiny), torch.tensor([[5, 9, 12]])
    with torch.no_grad():
        before = model(prompt).logits
        after = PeftModel.from_pretrained(model, target)(prompt).logits
    assert float((after - before).abs().max()) > 0.1
