"""`retrain export SUBJECT --to gguf|mlx|vllm`: a trained model for the programs that run models elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import ADAPTER_CONFIG
from retrain.records.reading import read_object
from retrain.run.opened import subject_config
from retrain.run.subject import Subject, find_subject
from retrain.text.terminal_text import printable
from retrain.use import whole_model

TYPES = {"gguf": ("f32", "f16", "bf16", "q8_0"), "mlx": ("bf16", "fp32"), "vllm": ("bf16", "fp32")}
GGUF_FILE = "model.gguf"  # what the hook writes
MLX_DTYPES = {"": (), "bf16": ("--dtype", "bfloat16"), "fp32": ("--dtype", "float32")}
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank
EPILOG = """\b
Examples:
  retrain export logs/train --to gguf --out model.gguf
  retrain export logs/train --to gguf --dtype q8_0 --out model.gguf
  retrain export logs/train --to mlx --out mlx-model
  retrain export logs/train --to vllm              the command line that serves the adapter
  retrain export logs/train --to vllm --out merged   a merged folder, and the command line that serves it

\b
Exit codes: 0 done; 1 what was written is not the trained model, so nothing is kept; 2 usage or configuration error.
"""


@click.command("export", epilog=EPILOG)
@click.argument("subject", metavar="RUN|ADAPTER|MODEL", type=click.Path())
@click.option("--to", "form", required=True, type=click.Choice(list(TYPES)), help="Which program is to run it.")
@click.option("--out", type=click.Path(path_type=Path), help="What to write: a file for gguf, else a folder.")
@click.option("--dtype", default="", help="Of the weights: f32, f16, bf16 or q8_0 in GGUF, else bf16 or fp32.")
@click.option("--checkpoint", default="", metavar="WHICH", help="Of a run: best, final, or a number of steps.")
@click.option("--no-check", is_flag=True, help="Do not compare logits, which loads one model after the other.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def command(
    plugins: Plugins,
    subject: str,
    form: str,
    out: Path | None,
    dtype: str,
    checkpoint: str,
    no_check: bool,
    as_json: bool,
) -> None:
    """Write a trained model for llama.cpp and what is built on it (GGUF), for MLX, or for vLLM, and say how to run it.

    Its adapter is merged into its base, and logits are compared; vLLM needs neither for a LoRA adapter."""
    _check_options(form, out, dtype)
    found = find_subject(subject, checkpoint)
    config = subject_config(found, plugins).config
    exported = EXPORTS[form](found, config, plugins, out, dtype, not no_check)
    if as_json:
        click.echo(json.dumps(exported, indent=2, allow_nan=False))
        return
    click.echo("\n".join(map(printable, [*exported.get("lines", ()), "run it:", f"  {exported['run']}"])))


def _check_options(form: str, out: Path | None, dtype: str) -> None:
    if dtype and dtype not in TYPES[form]:
        raise _usage(f"--dtype {dtype} is none of {form}'s", f"give one of {', '.join(TYPES[form])}")
    if out is None and form != "vllm":
        raise _usage(f"--to {form} needs --out", f"--out {'model.gguf' if form == 'gguf' else 'mlx-model'}")
    if form == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        raise _usage("mlx-lm, whose converter writes MLX models, is missing", "pip install mlx-lm")


def _to_gguf(
    found: Subject, config: Config, plugins: Plugins, out: Path | None, dtype: str, with_check: bool
) -> Mapping[str, Any]:
    """One file."""
    assert out is not None
    if out.exists() or out.is_symlink():
        raise ConfigError(Problem(where=str(out), what="exists", fix="name a new file: nothing is ever written over"))
    folder = out.with_name(f".{out.name}.folder")
    shutil.rmtree(folder, ignore_errors=True)  # left by an export that was killed
    written = whole_model.write_whole(found, config, plugins, folder, form="gguf", dtype=dtype, with_check=with_check)
    (folder / GGUF_FILE).rename(out)
    folder.rmdir()
    run = f"llama-cli -m {shlex.quote(str(out))} -cnv"
    return _exported(found, out, written, run)


def _to_mlx(
    found: Subject, config: Config, plugins: Plugins, out: Path | None, dtype: str, with_check: bool
) -> Mapping[str, Any]:
    """A folder, by mlx-lm's own converter, from a merged one that is thrown away."""
    assert out is not None
    whole_model.refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        merged, made = Path(scratch) / "merged", Path(scratch) / "mlx"
        written = whole_model.write_whole(
            found, config, plugins, merged, form="folder", dtype=dtype, with_check=with_check
        )
        convert = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(merged), "--mlx-path", str(made)]
        done = subprocess.run(
            [*convert, *MLX_DTYPES[dtype]],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode or not made.is_dir():
            why = " ".join((done.stderr.strip().splitlines() or ["no message"])[-1:])
            fix = "nothing was kept; a newer mlx-lm may know the model"
            raise BackendError(Problem(where=str(out), what="the converter of mlx-lm failed", why=why, fix=fix))
        if out.is_dir():
            out.rmdir()
        made.rename(out)
    return _exported(found, out, written, f"mlx_lm.chat --model {shlex.quote(str(out))}")


def _to_vllm(
    found: Subject, config: Config, plugins: Plugins, out: Path | None, dtype: str, with_check: bool
) -> Mapping[str, Any]:
    """The command line: vLLM serves a LoRA adapter as it is, and anything else as a merged folder."""
    if out is not None:
        written = whole_model.write_whole(
            found, config, plugins, out, form="folder", dtype=dtype, with_check=with_check
        )
        return _exported(found, out, written, f"vllm serve {shlex.quote(str(out))}")
    base, adapter = whole_model.base_of(found)
    config.refuse_lost("model.model")
    base = config.model.model if base == found.model else base
    located = plugins.locate_model(base) or base
    words = ["vllm", "serve", located]
    if adapter is not None:
        document = read_object(adapter / ADAPTER_CONFIG)
        rank = int(document.get("r", 0))
        fits = next((known for known in VLLM_RANKS if known >= rank), None)
        if document.get("use_dora") or fits is None:
            what = "vLLM does not serve DoRA" if document.get("use_dora") else f"vLLM serves no rank of {rank}"
            raise _usage(f"{what}, so it has to be merged", "add --out DIR")
        name = (found.run or adapter).resolve().name
        words += ["--enable-lora", "--max-lora-rank", str(fits), "--lora-modules", f"{name}={adapter.resolve()}"]
    return {
        "to": "vllm",
        "subject": found.named,
        "run": shlex.join(words),
        "lines": [f"{found.label}: nothing to write"],
    }


def _exported(found: Subject, out: Path, written: Any, run: str) -> Mapping[str, Any]:
    lines = whole_model.lines(found, out, written)
    return {**whole_model.as_data(found, out, written), "run": run, "lines": lines}


def _usage(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where="command line", what=what, fix=fix))


EXPORTS = {"gguf": _to_gguf, "mlx": _to_mlx, "vllm": _to_vllm}
