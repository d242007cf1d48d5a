"""Merged weights are the trained model: PEFT on transformers' modules is the referee."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from retrain.api import BackendError, ConfigError, ExportedModel, ModelExport, Plugins, load_plugins
from retrain.run.configure import load_checked
from retrain_local.export import gguf_file, write
from retrain_local.export.gguf_file import pre_tokenizer
from retrain_local.export.write import Gap
from retrain_local.model.adapter import PREFIX, Lora, adapter_config
from retrain_local.model.load import DTYPES
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.causal_types import small_model
from tests.kit.hf_models import SERVED, hf_model
from tests.kit.problems import refused
from tests.kit.random_models import BIASES, LLAMA3, OLD_LENGTH, SLIDING, random_model

TINY = "builtin:tiny"
BOUND = 1e-5
IDS = [5, 9, 300, 17, 2, 41, 7, 120]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


def random_adapter(folder: Path, *, kind: str = "lora", rank: int = 4) -> Path:
    """An adapter of every matrix of `builtin:tiny` whose B is not zero, in PEFT's files."""
    generator = torch.Generator().manual_seed(0)
    base = load_file(BUILTIN_MODELS["tiny"] / "model.safetensors")
    modules = [name.removesuffix(".weight") for name in base if name.endswith("_proj.weight")]
    tensors = {}
    for module in modules:
        weight_OI = base[f"{module}.weight"].float()
        a_RI = torch.randn(rank, weight_OI.shape[1], generator=generator) * 0.3
        b_OR = torch.randn(weight_OI.shape[0], rank, generator=generator) * 0.02
        tensors |= {f"{PREFIX}{module}.lora_A.weight": a_RI, f"{PREFIX}{module}.lora_B.weight": b_OR}
        if kind == "dora":
            stretch_O = 1.0 + 0.2 * torch.rand(len(weight_OI), generator=generator)
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = weight_OI.norm(dim=1) * stretch_O
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = (module.rpartition(".")[2] for module in modules)
    kinds = {"rslora": kind == "rslora", "dora": kind == "dora"}
    document = adapter_config(names, Lora(rank=rank, alpha=8, name=TINY, **kinds))
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder


def peft_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """As PEFT itself makes and saves it."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings))
        for name, p in peft.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                torch.nn.init.normal_(p, std=0.05)
        peft.save_pretrained(folder)
    return folder


def logits(model: Any, ids: list[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.double().eval()(input_ids=torch.tensor([ids]) % model.config.vocab_size).logits[0]


def refereed(adapter: Path, base: str | Path = BUILTIN_MODELS["tiny"]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(PeftModel.from_pretrained(model, str(adapter)))


def export(
    plugins: Plugins, out: Path, adapter: Path | None, *flags: str, base: str = TINY, **changes: Any
) -> ExportedModel:
    out.mkdir(parents=True)
    config = load_checked([f"--model={base}", *flags], plugins).config
    given = {"form": "folder", "dtype": "fp32", "with_check": True} | changes
    return write.export_model(ModelExport(base=base, adapter=adapter, out=out, config=config, plugins=plugins, **given))


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_merged_logits_are_those_of_base_plus_adapter(plugins: Plugins, tmp_path: Path, kind: str) -> None:
    adapter = random_adapter(tmp_path / "adapter", kind=kind)
    found = export(plugins, tmp_path / "out", adapter)
    assert found.gap < BOUND
    assert found.change > 0.1  # the check compares something
    assert not found.is_unchanged
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert float((logits(merged) - refereed(adapter)).abs().max()) < BOUND


@pytest.mark.parametrize("quantize", ["int8", "nf4"])
def test_a_quantised_base_is_merged_as_the_run_saw_it(plugins: Plugins, tmp_path: Path, quantize: str) -> None:
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    adapter = random_adapter(tmp_path / "adapter")
    flags = (f"--quantize={quantize}", "--lora-rank=4", "--lora-alpha=8", "--devices=cpu")
    found = export(plugins, tmp_path / "out", adapter, *flags)
    assert found.gap < BOUND  # of dequantised base plus adapter
    assert found.quantised_gap < 1e-4  # of the run's own decoder, in fp32
    plain = load_file(BUILTIN_MODELS["tiny"] / "model.safetensors")
    merged, name = load_file(tmp_path / "out/model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    a, b = (load_file(adapter / "adapter_model.safetensors")[f"{PREFIX}{name[:-7]}.lora_{x}.weight"] for x in "AB")
    rounding = float((merged[name] - 2 * b @ a - plain[name].float()).abs().max())
    assert 1e-4 < rounding < 0.1  # W' is not W


def test_a_folder_has_shards_and_tokenizer(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES", 500_000)
    adapter = random_adapter(tmp_path / "adapter")
    found = export(plugins, tmp_path / "out", adapter, dtype="bf16", with_check=False)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) == 3
    assert len(index["weight_map"]) == found.tensors
    with safe_open(tmp_path / "out" / shards[0], framework="pt") as stream:
        assert {stream.get_tensor(name).dtype for name in stream.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (BUILTIN_MODELS["tiny"] / name).read_bytes()
    assert found.dtype == "bf16"


def test_a_narrow_base_warns_of_its_dtype(plugins: Plugins, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = random_adapter(tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    for trained, dtype, written in (
        ("fp32", "bf16", "bf16"),
        ("fp32", "fp32", "fp32"),
        ("bf16", "", "bf16"),
        ("fp32", "", ""),
    ):
        save_file({name: tensor.to(DTYPES[trained]) for name, tensor in load_file(file).items()}, file)
        found = export(plugins, tmp_path / f"{trained} {dtype}", adapter, dtype=dtype, with_check=False)
        assert found.dtype == (written or "bf16")
        assert ("bf16 is written" in caplog.text and "--dtype fp32" in caplog.text) is (written == "")


def test_an_adapter_that_changes_nothing_is_told(plugins: Plugins, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter")
    zero = {name: t * (".lora_B." not in name) for name, t in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(zero, adapter / "adapter_model.safetensors")
    assert export(plugins, tmp_path / "out", adapter, with_check=False).is_unchanged
    kept, plain = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", BUILTIN_MODELS["tiny"]))
    assert all(torch.equal(kept[name], plain[name].float()) for name in plain)


def test_whole_weights_are_copied_from_the_exact_ones(plugins: Plugins, tmp_path: Path) -> None:
    """A checkpoint of all weights holds the trained numbers beside those rounded to the dtype of its model."""
    model = tmp_path / "model"
    shutil.copytree(BUILTIN_MODELS["tiny"], model)
    exact = {name: t.float() + 1e-4 for name, t in load_file(model / "model.safetensors").items()}
    save_file(exact, model / "master_weights.safetensors")
    (model / "backend_state.json").write_text("{}")
    found = export(plugins, tmp_path / "out", None, base=str(model), with_check=False)
    written = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(written[name], exact[name]) for name in exact)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        p.name for p in BUILTIN_MODELS["tiny"].iterdir()
    )
    assert export(plugins, tmp_path / "own", None, base=str(model), with_check=False, dtype="").dtype == "bf16"
    assert found.change is None


def test_what_is_more_than_matrices_is_merged_by_peft_or_refused(plugins: Plugins, tmp_path: Path) -> None:
    """Factors of an embedding; where the head is tied to it, PEFT's merged model is another one than it computed."""
    base = tmp_path / "llama"
    hf_model("Llama", SERVED["Llama"]).save_pretrained(base)
    adapter = peft_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "embed_tokens"])
    found = export(plugins, tmp_path / "out", adapter, base=str(base), with_check=False)
    assert "PEFT" in found.notes[0]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert float((logits(merged) - refereed(adapter, base)).abs().max()) < BOUND
    gguf = {"base": str(base), "form": "gguf", "dtype": "f32"}
    assert refused(export, plugins, tmp_path / "gguf", adapter, **gguf) == ["export.gguf-adapter"]


def test_adapters_of_other_architectures_are_merged_or_refused(plugins: Plugins, tmp_path: Path) -> None:
    base = tmp_path / "gpt2"  # matrices are stored transposed, and its files omit the name of the body
    hf_model("GPT2", SERVED["GPT2"]).save_pretrained(base)
    adapter = peft_adapter(tmp_path / "adapter", base, target_modules="all-linear", fan_in_fan_out=True)
    found = export(plugins, tmp_path / "out", adapter, base=str(base), with_check=False)
    assert found.notes == ()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert float((logits(merged) - refereed(adapter, base)).abs().max()) < BOUND
    tied = peft_adapter(tmp_path / "tied", BUILTIN_MODELS["tiny"], target_modules=["embed_tokens"])
    with pytest.raises(BackendError, match="differ by"):
        export(plugins, tmp_path / "tied-out", tied)


def test_a_mixture_of_experts_is_merged_and_compared(plugins: Plugins, tmp_path: Path) -> None:
    base = tmp_path / "moe"
    small_model("qwen3_moe", vocab_size=512).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODELS["tiny"] / name, base)
    adapter = peft_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "v_proj"])
    found = export(plugins, tmp_path / "out", adapter, base=str(base))
    assert found.gap < BOUND
    assert found.change > 0.05


def test_adapters_that_cannot_be_merged_are_refused(plugins: Plugins, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    document = json.loads(file.read_text())

    def check(code: str, base: str | Path = TINY) -> None:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert refused(export, plugins, tmp_path / "out", adapter, base=str(base)) == [code]

    lora = '{"peft_type": "LORA", "lora_alpha": 1' + "0" * 400 + "}"
    for settings in ('{"peft_type": "LORA"}', lora, "[" * 100_000, "[]"):
        file.write_text(settings)
        check("export.adapter-unreadable")
    for init in ("pissa_niter_4", "olora", "corda", "loftq"):
        file.write_text(json.dumps(document | {"init_lora_weights": init}))
        check("export.changed-base")
    file.write_text(json.dumps(document | {"peft_type": "IA3"}))
    check("export.adapter-kind")
    file.write_text(json.dumps(document))
    hf_model("Llama", SERVED["Llama"]).save_pretrained(tmp_path / "other")
    check("export.other-base", tmp_path / "other")
    check("model.no-such-folder", tmp_path / "missing")
    broken = {name: t * float("nan") for name, t in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(broken, adapter / "adapter_model.safetensors")
    check("export.adapter-non-finite")


def test_a_short_disk_is_refused_in_advance(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = random_adapter(tmp_path / "adapter")
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert refused(export, plugins, tmp_path / "out", adapter) == ["export.disk-full"]
    assert list((tmp_path / "out").iterdir()) == []


def test_logits_beyond_rounding_are_refused() -> None:
    request: Any = SimpleNamespace(base=TINY)
    for kind, gap, code in (("fp32", 2e-4, "other"), ("bf16", 2.0, "other"), ("bf16", float("nan"), "non-finite")):
        found = Gap(written=gap, trained=1.0, size=10.0)
        assert refused(write.refuse_gap, found, kind, request) == [f"export.{code}-logits"]
    write.refuse_gap(Gap(written=2e-5, trained=1.0, size=10.0), "fp32", request)


def test_another_model_is_refused(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = random_adapter(tmp_path / "adapter")
    merged: Callable[..., Any] = write.MergedWeights.tensor
    monkeypatch.setattr(write.MergedWeights, "tensor", lambda self, name: merged(self, name) * 1.001)
    with pytest.raises(BackendError, match="the logits of the written model differ"):
        export(plugins, tmp_path / "out", adapter)


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


def to_gguf(base: Path | str, out: Path, dtype: str = "f32", **more: Any) -> Any:
    return export(load_plugins(), out, None, base=str(base), form="gguf", dtype=dtype, **more)


@pytest.mark.client
@pytest.mark.parametrize("name", HELD)
def test_transformers_reads_equal_logits_from_the_file_alone(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", name)
    assert to_gguf(base, tmp_path / "out").gap < 1e-3
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
    found = to_gguf(base, tmp_path / "out", dtype)
    assert 0.0 < found.gap < bound
    assert found.num_bytes < 0.8 * to_gguf(base, tmp_path / "wide").num_bytes


@pytest.mark.client
def test_rows_in_the_order_of_transformers_would_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: llama.cpp rotates neighbouring channels."""
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", "llama")
    monkeypatch.setattr(gguf_file, "_neighbouring", lambda x, heads: x)
    assert refused(to_gguf, base, tmp_path / "out") == ["export.other-logits"]


@pytest.mark.client
@pytest.mark.parametrize("name", [*HELD, "llama3"])
def test_llama_cpp_gives_the_same_probabilities(name: str, tmp_path: Path) -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    base = write_base(tmp_path / "base", name)
    to_gguf(base, tmp_path / "out", with_check=False)
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
        to_gguf(base, tmp_path / "out")
    folder = SimpleNamespace(document={"model_type": "gpt2"}, name="a")
    with pytest.raises(ConfigError, match="GGUF is not written for gpt2"):
        gguf_file._architecture(folder)  # type: ignore[arg-type]
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package gguf is missing"):
        to_gguf("builtin:tiny", tmp_path / "missing")
