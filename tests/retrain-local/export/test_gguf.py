"""GGUF files are read back by those who read them: transformers, and llama.cpp."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from retrain.api import ConfigError, ModelExport, load_plugins
from retrain.run.configure import load_checked
from retrain_local.export import gguf_file, write
from retrain_local.export.gguf_file import pre_tokenizer
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.problems import refused
from tests.kit.random_models import BIASES, LLAMA3, OLD_LENGTH, SLIDING, random_model

IDS = [5, 9, 300, 17, 2, 41, 7, 120]
LARGE = {"vocab_size": 520, "hidden_size": 64}  # more rows than the tokenizer has tokens
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied with biases": ("Llama", BIASES | {"rope_theta": 50_000.0}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "llama3": ("Llama", {"rope_scaling": LLAMA3 | OLD_LENGTH | {"rope_theta": 10_000.0}}),
    "qwen2 with windows": ("Qwen2", SLIDING | {"max_window_layers": 1}),
}
HELD = [name for name in MODELS if name not in ("llama3", "qwen2 with windows")]


def write_base(folder: Path, name: str) -> Path:
    kind, sizes = MODELS[name]
    random_model(kind, **LARGE | sizes).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILTIN_MODELS["tiny"] / file, folder / file)
    return folder


def export(base: Path | str, out: Path, dtype: str = "f32", *, with_check: bool = True) -> Any:
    out.mkdir()
    plugins = load_plugins()
    config = load_checked([f"--model={base}"], plugins).config
    given = {"form": "gguf", "dtype": dtype, "with_check": with_check, "config": config, "plugins": plugins}
    return write.export_model(ModelExport(base=str(base), adapter=None, out=out, **given))  # type: ignore[arg-type]


def logits(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.client
@pytest.mark.parametrize("name", HELD)
def test_transformers_reads_equal_logits_from_the_file_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", name)
    assert export(base, tmp_path / "out").gap < 1e-3
    # transformers does not look for biases of llama, which llama.cpp does
    known = {"config": AutoConfig.from_pretrained(base)} if "biases" in name else {}
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32, **known)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert float((logits(read) - logits(plain)).abs().max()) < 1e-3
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    ours = AutoTokenizer.from_pretrained(base)
    assert theirs.chat_template == ours.chat_template
    assert theirs.eos_token_id == ours.eos_token_id
    assert theirs.convert_ids_to_tokens(list(range(512))) == ours.convert_ids_to_tokens(list(range(512)))


@pytest.mark.client
@pytest.mark.parametrize(("dtype", "bound"), [("f16", 0.05), ("bf16", 0.2), ("q8_0", 0.5)])
def test_narrower_types_are_rounded(dtype: str, bound: float, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", "qwen2")
    found = export(base, tmp_path / "out", dtype)
    assert 0.0 < found.gap < bound
    assert found.num_bytes < 0.8 * export(base, tmp_path / "wide").num_bytes


@pytest.mark.client
def test_rows_in_the_order_of_transformers_would_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: llama.cpp rotates neighbouring channels."""
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", "llama")
    monkeypatch.setattr(gguf_file, "_neighbouring", lambda x, heads: x)
    assert refused(export, base, tmp_path / "out") == ["export.other-logits"]


@pytest.mark.client
@pytest.mark.parametrize("name", [*HELD, "llama3"])
def test_llama_cpp_gives_the_same_probabilities(name: str, tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", name)
    export(base, tmp_path / "out", with_check=False)
    params = xllamacpp.CommonParams()
    params.model.path = str(tmp_path / "out/model.gguf")
    params.n_ctx, params.cpuparams.n_threads, params.n_parallel, params.warmup = 64, 1, 1, False
    server = xllamacpp.Server(params)
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 5}
    prompts = [[*IDS, tail] for tail in (33, 77, 250)]
    answers = [server.handle_completions(asked | {"prompt": ids})["choices"][0]["logprobs"] for ids in prompts]
    ids, answer = next((ids, answer) for ids, answer in zip(prompts, answers, strict=True) if answer)  # no end of text
    top = answer["content"][0]["top_logprobs"]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = torch.log_softmax(logits(plain, ids)[-1], -1).topk(5)
    assert [each["id"] for each in top] == wanted.indices.tolist()
    assert [each["logprob"] for each in top] == pytest.approx(wanted.values.tolist(), abs=0.02)  # f16 keys and values


def test_pre_tokenizers_have_llama_cpps_names() -> None:
    byte_level = {"type": "ByteLevel", "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert pre_tokenizer({"pre_tokenizer": byte_level}) == "gpt-2"
    assert pre_tokenizer({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]}}) == "smollm"
    for digit, name in ((r"\p{N}", "qwen2"), (r"\p{N}{1,3}", "llama-bpe")):
        words, rest = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        split = rf"{words}|{digit}|{rest}|\s+(?!\S)|\s+"
        steps = [{"type": "Split", "pattern": {"Regex": split}}, {"type": "ByteLevel", "use_regex": False}]
        assert pre_tokenizer({"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}) == name
    assert pre_tokenizer({"pre_tokenizer": {"type": "Whitespace"}}) == "default"
    assert pre_tokenizer({}) == "default"


def test_models_that_gguf_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_base(tmp_path / "windows", "qwen2 with windows")
    with pytest.raises(ConfigError, match="see a window of 5 tokens"):
        export(base, tmp_path / "out")
    folder = SimpleNamespace(document={"model_type": "gpt2"}, name="a")
    with pytest.raises(ConfigError, match="GGUF is not written for gpt2"):
        gguf_file._architecture(folder)  # type: ignore[arg-type]
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package gguf is missing"):
        export("builtin:tiny", tmp_path / "missing")
