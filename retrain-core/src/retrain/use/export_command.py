"""`retrain export SUBJECT`: a trained model for the programs that load and run models, or for the hub."""

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
from retrain.text.command_options import checkpoint_option, json_option, subject_argument
from retrain.text.terminal_text import printable, program
from retrain.use import whole_model
from retrain.use.hub_upload import push

TRANSFORMERS = "transformers"
MERGED_TYPES = ("bf16", "fp32")
TYPES = {
    TRANSFORMERS: MERGED_TYPES,
    "gguf": ("f32", "f16", "bf16", "q8_0"),
    "mlx": MERGED_TYPES,
    "vllm": MERGED_TYPES,
}
GGUF_FILE = "model.gguf"  # what the hook writes
MLX_DTYPES = {"": (), "bf16": ("--dtype", "bfloat16"), "fp32": ("--dtype", "float32")}
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank
EPILOG = """\b
Examples:
  retrain export logs/train --format transformers --out merged
  retrain export logs/train --format transformers --checkpoint best --dtype fp32 --out merged
  retrain export logs/train --format gguf --dtype q8_0 --out model.gguf
  retrain export logs/train --format mlx --out mlx-model
  retrain export logs/train --format vllm              the command line that serves the adapter
  retrain export logs/train --format vllm --out merged   a merged folder, and the command line that serves it
  retrain export logs/train --push me/sums --dry-run   writes the folder ./sums, without a network
  retrain export logs/train --push me/sums --private
  retrain export logs/train --push me/sums --format transformers   whole weights instead of the adapter

\b
Exit codes: 0 done; 1 what was written is not the trained model, so nothing is kept, or the upload failed; 2 usage or
            configuration error.
"""


@click.command("export", epilog=EPILOG)
@subject_argument()
@click.option("--format", "form", type=click.Choice(list(TYPES)), help="Which program is to load or run it.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="What to write: a file for gguf, otherwise a new or empty folder."
)
@click.option("--dtype", default="", help="Of the weights: f32, f16, bf16 or q8_0 in GGUF, else bf16 or fp32.")
@checkpoint_option()
@click.option("--no-check", is_flag=True, help="Do not compare logits, which loads one model after the other.")
@click.option("--push", "repo", metavar="REPO", help="Upload to this repository of the hub: NAME, or OWNER/NAME.")
@click.option("--private", is_flag=True, help="With --push: a repository that is made is private.")
@click.option("--dry-run", is_flag=True, help="With --push: write the folder (--out, or NAME), and upload nothing.")
@json_option()
@click.pass_obj
def command(
    plugins: Plugins,
    subject: str,
    form: str | None,
    out: Path | None,
    dtype: str,
    checkpoint: str,
    no_check: bool,
    repo: str | None,
    private: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write SUBJECT, a run, an adapter or a model, for transformers, for llama.cpp and what is built on it (GGUF), for
    MLX, or for vLLM, and say how to run it; or push it to the Hugging Face hub.

    Its adapter is merged into its base, and the logits are compared with those of base and adapter before the result
    appears; vLLM needs neither for a LoRA adapter.

    --push uploads the adapter, or with --format transformers whole weights, with a model card (data, reward, curves,
    held-out figures) and the configuration that repeats the run. The folder holds no secret and no path of this
    machine. The token is the one that `hf auth login` stored.
    """
    _check_options(form, out, dtype, repo, is_push_option=private or dry_run)
    found = find_subject(subject, checkpoint)
    config = subject_config(found, plugins).config
    if repo:
        data, lines = push(
            found,
            config,
            plugins,
            repo=repo,
            merged=form == TRANSFORMERS,
            dtype=dtype,
            with_check=not no_check,
            private=private,
            dry_run=dry_run,
            out=out,
        )
    else:
        assert form is not None  # checked above
        data = EXPORTS[form](found, config, plugins, out, dtype, not no_check)
        purpose = "train on from it:" if form == TRANSFORMERS else "run it:"
        lines = [*data.get("lines", ()), purpose, f"  {data['run']}"]
    click.echo(json.dumps(data, indent=2, allow_nan=False) if as_json else "\n".join(map(printable, lines)))


def _check_options(form: str | None, out: Path | None, dtype: str, repo: str | None, *, is_push_option: bool) -> None:
    if not form and not repo:
        raise click.UsageError("give --format or --push")
    if is_push_option and not repo:
        raise click.UsageError("--private and --dry-run go with --push")
    if repo and form not in (None, TRANSFORMERS):
        raise click.UsageError(f"--push goes without --format or with --format {TRANSFORMERS}")
    form = form or TRANSFORMERS
    if dtype and dtype not in TYPES[form]:
        raise _usage(f"--dtype {dtype} is none of {form}'s", f"give one of {', '.join(TYPES[form])}")
    if out is None and form != "vllm" and not repo:
        raise _usage(f"--format {form} needs --out", f"--out {'model.gguf' if form == 'gguf' else f'{form}-model'}")
    if form == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        raise _usage("mlx-lm, whose converter writes MLX models, is missing", "pip install mlx-lm")


def _to_transformers(
    found: Subject, config: Config, plugins: Plugins, out: Path | None, dtype: str, with_check: bool
) -> Mapping[str, Any]:
    """A folder with merged weights, tokenizer and chat template."""
    assert out is not None
    written = whole_model.write_whole(found, config, plugins, out, form="folder", dtype=dtype, with_check=with_check)
    return _exported(found, out, written, f"{program()} --model {shlex.quote(str(out))}")


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
        "format": "vllm",
        "subject": found.named,
        "run": shlex.join(words),
        "lines": [f"{found.label}: nothing to write"],
    }


def _exported(found: Subject, out: Path, written: Any, run: str) -> Mapping[str, Any]:
    lines = whole_model.lines(found, out, written)
    return {**whole_model.as_data(found, out, written), "run": run, "lines": lines}


def _usage(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where="command line", what=what, fix=fix))


EXPORTS = {TRANSFORMERS: _to_transformers, "gguf": _to_gguf, "mlx": _to_mlx, "vllm": _to_vllm}
