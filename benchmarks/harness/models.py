"""Models of any size, without a download: the built-in one, a folder that is there, random weights of a known shape."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.runs import QUESTION

from retrain.api import load_plugins

MAKER = Path(__file__).parents[1] / "workers/make_model.py"
POSITIONS = 4096
NEVER = "<|never|>"  # an end of sequence that the model has no logit for
ITEM_BYTES = {"fp32": 4, "bf16": 2}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151_936,
    "dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},  # builtin:tiny with its own weights
    "small": QWEN3
    | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    | {"head_dim": 32, "num_key_value_heads": 2, "vocab_size": 4096},
    "qwen3-0.6b": QWEN3
    | {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "qwen3-4b": QWEN3
    | {"num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """`--device`, `--shape`, `--model` and `--dtype`, the same for every benchmark."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny", help="random weights unless it is tiny")
    parser.add_argument("--model", default="", metavar="DIR", help="a model's folder, instead of a shape")
    text = "of the model on all sides; auto: ours decides, the others take fp32 on a CPU and bf16 on CUDA"
    parser.add_argument("--dtype", choices=("auto", *ITEM_BYTES), default="auto", help=text)


def peer_dtype(options: argparse.Namespace) -> str:
    """`fp32` or `bf16`: the type that the peers compute in, and that the limits count."""
    plain = "fp32" if options.device == "cpu" else "bf16"
    return plain if options.dtype == "auto" else str(options.dtype)


def our_model(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Table `[model]` of our configuration."""
    dtype = {} if options.dtype == "auto" else {"dtype": options.dtype}
    return {"model": str(folder), "lora_rank": options.rank, **dtype}


def model_name(options: argparse.Namespace) -> str:
    """What a table calls it."""
    return f"{Path(options.model).resolve().name}, {peer_dtype(options)}" if options.model else f"shape {options.shape}"


def natural_model(options: argparse.Namespace) -> Path:
    """The model as it is: a folder, or the built-in one."""
    return Path(options.model).resolve() if options.model else builtin_folder()


def table_name(benchmark: str, options: argparse.Namespace) -> str:
    """The marker of a table: a given model has a table of its own for each type and size."""
    size = f"{options.batch} x {options.group} x {options.new}"
    return f"{benchmark}, {model_name(options)}, {size}" if options.model else benchmark


def prompt_tokens(model: Path) -> int:
    """Tokens of a question with the chat template of this model."""
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": QUESTION.format(23, 45)}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def builtin_folder() -> Path:
    """Where `builtin:tiny` is installed."""
    located = load_plugins().locate_model("builtin:tiny")
    if not located:
        sys.exit("builtin:tiny is missing: pip install ./retrain-local")
    return Path(located)


def endless_model(
    folder: Path, *, shape: str = "tiny", vocabulary: int = 0, layers: int = 0, device: str = "cpu", model: str = ""
) -> Path:
    """A model whose completions never end by themselves, so that all contenders draw exactly as many tokens.

    `vocabulary` and `layers` replace the shape's (`layers` not those of `tiny`); entries and embeddings without a
    meaning fill up a vocabulary. Shape `tiny` keeps the built-in weights; any other has random ones, in bf16, made on
    `device`. A folder `model` keeps its weights, too.
    """
    folder.mkdir(parents=True)
    if model:
        return _endless_copy(Path(model).resolve(), folder)
    base = builtin_folder()
    config = json.loads((base / "config.json").read_text(encoding="utf-8")) | SHAPES[shape]
    if SHAPES[shape]:
        config["num_hidden_layers"] = layers or config["num_hidden_layers"]
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    size = vocabulary or config["vocab_size"]
    is_larger = shape != "tiny" or size != config["vocab_size"]
    config |= {"vocab_size": size, "eos_token_id": None, "max_position_embeddings": POSITIONS}
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", {"do_sample": False, "pad_token_id": 0})
    _write_tokenizer(base, folder, size)
    if is_larger:
        weights = str(base) if shape == "tiny" else ""
        subprocess.run([sys.executable, str(MAKER), str(folder), device, weights], check=True)
    else:
        shutil.copy(base / "model.safetensors", folder)
    return folder


def _endless_copy(base: Path, folder: Path) -> Path:
    """All files of `base`, the weights as links."""
    for file in base.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        elif file.is_file():
            shutil.copy(file, folder)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _write(folder / "config.json", config | {"eos_token_id": None})
    _write(folder / "generation_config.json", {"do_sample": False, "pad_token_id": config.get("pad_token_id") or 0})
    _write_tokenizer(base, folder, config["vocab_size"])
    return folder


def _write_tokenizer(base: Path, folder: Path, size: int) -> None:
    tokenizer = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    used = {*known.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    known |= {f"<|filler{at}|>": at for at in range(size) if at not in used}
    tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=size, content=NEVER))
    _write(folder / "tokenizer.json", tokenizer)
    settings = json.loads((base / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write(folder / "tokenizer_config.json", settings | {"eos_token": NEVER, "model_max_length": POSITIONS})


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
