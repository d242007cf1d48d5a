from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from retrain.api import BackendError
from retrain_tinker.adapter import CONFIG_FILE, WEIGHTS_FILE, download, repair
from tests.kit.problems import codes_in

ATTENTION = [f"base_model.model.model.layers.{n}.self_attn.{p}_proj" for n in (0, 10) for p in "qkvo"]
WEIGHTS = save({"a": np.zeros(1)})
UNUSABLE = ["tinker.unusable-adapter"]
LINKS = ((tarfile.SYMTYPE, "../secret"), (tarfile.LNKTYPE, "../secret"))


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> None:
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 32.0, **config}))


def factors(modules: list[str]) -> dict[str, np.ndarray]:
    return {f"{module}.lora_{side}.weight": np.zeros((2, 2), np.float32) for module in modules for side in "AB"}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        *((given, [f"{p}_proj" for p in "kqvo"]) for given in (None, [], ["q_proj", "v_proj"])),
        ("all-linear", "all-linear"),
        *[([f"{p}_proj" for p in ("q", "k", "v", "o", "up")],) * 2],
    ],
    ids=str,
)
def test_target_modules_that_do_not_cover_the_weights_are_taken_from_them(
    tmp_path: Path, given: Any, wanted: Any
) -> None:
    write_adapter(tmp_path, factors(ATTENTION), target_modules=given)
    repair(tmp_path, "models/base")
    found = json.loads((tmp_path / CONFIG_FILE).read_text())
    is_derived = wanted != given
    assert found["target_modules"] == (sorted(wanted) if is_derived else wanted)
    assert (found["base_model_name_or_path"], found["r"], found["lora_alpha"]) == ("models/base", 2, 32.0)


def test_a_repaired_adapter_is_loaded_whole_by_peft(tmp_path: Path) -> None:
    """Without the repair PEFT takes its defaults for the architecture, q_proj and v_proj, and drops the rest."""
    pytest.importorskip("peft", reason="PEFT comes with retrain-local")
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import Qwen3Config, Qwen3ForCausalLM

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = dict(zip(names, (8, 1, 2, 2, 4), strict=True))
    base = Qwen3ForCausalLM(Qwen3Config(**sizes, intermediate_size=16, vocab_size=11, max_position_embeddings=32))
    random = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{name}.lora_{side}.weight": random.normal(size=size).astype(np.float32)
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and "lm_head" not in name
        for side, size in (("A", (2, module.weight.shape[1])), ("B", (module.weight.shape[0], 2)))
    }
    write_adapter(tmp_path, tensors, target_modules=None)
    repair(tmp_path, "base")
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(base, tmp_path))
    assert loaded.keys() == tensors.keys()
    assert all(np.array_equal(loaded[name].numpy(), tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((CONFIG_FILE, content) for content in (b"{", b"[1]", b"", b"\xff")),
        (WEIGHTS_FILE, b"\x80\x04pickled"),
        (WEIGHTS_FILE, save({"model.norm.weight": np.zeros(2)})),
    ],
    ids=str,
)
def test_a_broken_adapter_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    write_adapter(tmp_path, factors(ATTENTION))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BackendError) as caught:
        repair(tmp_path, "base")
    assert codes_in(caught) == UNUSABLE


# ---------------------------------------------------------------- archives


def archive(**members: bytes | tuple[bytes, str]) -> bytes:
    """An archive with a member for each path: a file's content, or kind and target of a link."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = content
                packed.addfile(member)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    return folder


def test_only_the_two_files_are_taken_from_an_archive_or_by_name(
    folder: Path, serve_bytes: Callable[[bytes], str]
) -> None:
    others = dict.fromkeys(("../../escaped.txt", "/etc/absolute.txt", "run.py"), b"x")
    content = archive(**others, **{f"deep/{CONFIG_FILE}": b"{}", f"./{WEIGHTS_FILE}": WEIGHTS})
    download({"": serve_bytes(content)}, folder, 5.0)
    assert sorted(path.name for path in folder.parent.rglob("*")) == ["adapter", CONFIG_FILE, WEIGHTS_FILE]
    url = serve_bytes(WEIGHTS)
    download({CONFIG_FILE: url, f"sub/{WEIGHTS_FILE}": url, "../x": url}, folder, 5.0)
    assert sorted(path.name for path in folder.parent.rglob("*")) == ["adapter", CONFIG_FILE, WEIGHTS_FILE]
    assert (folder / CONFIG_FILE).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "content",
    [
        *(archive(**{CONFIG_FILE: link, WEIGHTS_FILE: WEIGHTS}) for link in LINKS),
        *(b"", b"no archive", archive(**{WEIGHTS_FILE: WEIGHTS})[:60]),
    ],
    ids=["symbolic link", "hard link", "empty", "text", "cut"],
)
def test_a_broken_archive_or_a_link_in_one_is_refused_and_removed(
    folder: Path, serve_bytes: Callable[[bytes], str], content: bytes
) -> None:
    (folder.parent / "secret").write_text("s3cret")
    with pytest.raises(BackendError) as caught:
        download({"": serve_bytes(content)}, folder, 5.0)
    assert codes_in(caught) == UNUSABLE
    assert not [path for path in folder.iterdir() if path.name != WEIGHTS_FILE]


def test_a_signed_address_is_not_shown(tmp_path: Path, serve_bytes: Callable[[bytes], str]) -> None:
    with pytest.raises(BackendError, match="status 404") as caught:
        download({"": serve_bytes(b"") + "-gone?X-Amz-Signature=deadbeef"}, tmp_path, 5.0)
    assert "deadbeef" not in str(caught.value)
