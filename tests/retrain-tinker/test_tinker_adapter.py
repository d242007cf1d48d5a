from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from retrain.api import BackendError
from retrain_tinker.adapter import CONFIG_FILE, WEIGHTS_FILE, download, repair

ATTENTION = [f"base_model.model.model.layers.{n}.self_attn.{p}_proj" for n in (0, 10) for p in "qkvo"]


def write_adapter(folder: Path, modules: list[str], **config: object) -> None:
    tensors = {f"{m}.lora_{side}.weight": np.zeros((2, 2), np.float32) for m in modules for side in "AB"}
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 32.0, **config}))


def config_of(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / CONFIG_FILE).read_text())
    return found


@pytest.mark.parametrize("given", [None, [], ["q_proj", "v_proj"]], ids=str)
def test_target_modules_are_taken_from_the_weights(tmp_path: Path, given: object) -> None:
    write_adapter(tmp_path, [*ATTENTION, "base_model.model.lm_head"], target_modules=given)
    repair(tmp_path, "models/base")
    found = config_of(tmp_path)
    assert found["target_modules"] == ["k_proj", "lm_head", "o_proj", "q_proj", "v_proj"]
    assert found["base_model_name_or_path"] == "models/base"
    assert (found["r"], found["lora_alpha"]) == (2, 32.0)


@pytest.mark.parametrize("given", ["all-linear", ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]], ids=str)
def test_target_modules_that_cover_the_weights_stay(tmp_path: Path, given: object) -> None:
    write_adapter(tmp_path, ATTENTION, target_modules=given)
    repair(tmp_path, "base")
    assert config_of(tmp_path)["target_modules"] == given


def test_a_repaired_adapter_is_loaded_whole_by_peft(tmp_path: Path) -> None:
    """Without the repair PEFT takes its defaults for the architecture, q_proj and v_proj, and drops the rest."""
    pytest.importorskip("peft", reason="PEFT comes with retrain-local")
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    base = Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=16, vocab_size=11, max_position_embeddings=32))
    names = [
        name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear) and "lm_head" not in name
    ]
    shapes = {name: base.get_submodule(name).weight.shape for name in names}
    random = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": random.normal(size=size).astype(np.float32)
        for name, (out, into) in shapes.items()
        for side, size in (("A", (2, into)), ("B", (out, 2)))
    }
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 32.0, "target_modules": None}
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
    repair(tmp_path, "base")
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, tmp_path))
    assert loaded.keys() == tensors.keys()
    assert all(np.array_equal(loaded[name].numpy(), tensors[name]) for name in tensors)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"", b"\xff"], ids=str)
def test_a_broken_config_is_told(tmp_path: Path, content: bytes) -> None:
    write_adapter(tmp_path, ATTENTION)
    (tmp_path / CONFIG_FILE).write_bytes(content)
    with pytest.raises(BackendError, match="cannot be read"):
        repair(tmp_path, "base")


def test_weights_that_are_none_are_told(tmp_path: Path) -> None:
    write_adapter(tmp_path, ATTENTION)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"\x80\x04pickled")
    with pytest.raises(BackendError, match="cannot be read"):
        repair(tmp_path, "base")
    save_file({"model.norm.weight": np.zeros(2)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(BackendError, match="holds no LoRA factors"):
        repair(tmp_path, "base")


# ---------------------------------------------------------------- archives


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for member, content in members:
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def plain(name: str, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    return member, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


WEIGHTS = save({"a": np.zeros(1)})


def test_only_the_two_files_are_taken_from_an_archive(tmp_path: Path, serve_bytes: object) -> None:
    content = archive(
        plain("../../escaped.txt", b"x"),
        plain("/etc/absolute.txt", b"x"),
        plain("deep/adapter_config.json", b"{}"),
        plain("./adapter_model.safetensors", WEIGHTS),
        plain("run.py", b"x"),
    )
    folder = tmp_path / "adapter"
    folder.mkdir()
    download({"": serve_bytes(content)}, folder, 5.0)  # type: ignore[operator]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["adapter", CONFIG_FILE, WEIGHTS_FILE]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE], ids=["symbolic", "hard"])
def test_a_link_in_an_archive_is_not_followed(tmp_path: Path, serve_bytes: object, kind: bytes) -> None:
    (tmp_path / "secret").write_text("s3cret")
    content = archive(link(CONFIG_FILE, str(tmp_path / "secret"), kind), plain(WEIGHTS_FILE, WEIGHTS))
    folder = tmp_path / "adapter"
    folder.mkdir()
    with pytest.raises(BackendError, match=r"broken|has no adapter_config"):
        download({"": serve_bytes(content)}, folder, 5.0)  # type: ignore[operator]
    assert not (folder / CONFIG_FILE).exists()


@pytest.mark.parametrize(
    "content", [b"", b"no archive", archive(plain(WEIGHTS_FILE, WEIGHTS))[:60]], ids=["empty", "text", "cut"]
)
def test_a_broken_archive_is_told(tmp_path: Path, serve_bytes: object, content: bytes) -> None:
    with pytest.raises(BackendError, match="archive is broken"):
        download({"": serve_bytes(content)}, tmp_path, 5.0)  # type: ignore[operator]
    assert not list(tmp_path.glob("*.tar"))


def test_single_files_are_fetched_by_name(tmp_path: Path, serve_bytes: object) -> None:
    url = serve_bytes(WEIGHTS)  # type: ignore[operator]
    download({"adapter_config.json": url, "sub/adapter_model.safetensors": url, "../x": url}, tmp_path, 5.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


def test_a_signed_address_is_not_shown(tmp_path: Path, serve_bytes: object) -> None:
    url = serve_bytes(b"", 403) + "?X-Amz-Signature=deadbeef"  # type: ignore[operator]
    with pytest.raises(BackendError, match="status 403") as caught:
        download({"": url}, tmp_path, 5.0)
    assert "deadbeef" not in str(caught.value)
