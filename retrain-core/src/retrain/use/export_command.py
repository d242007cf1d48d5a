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
from pathlib import Path
from typing import Any

import click

from retrain.kernel.contracts.export import ExportedModel
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import ADAPTER_CONFIG
from retrain.records.reading import read_object
from retrain.run.opened import subject_config
from retrain.run.subject import find_subject
from retrain.text.command_options import checkpoint_option, json_option, subject_argument
from retrain.text.terminal_text import printable, program
from retrain.use.hub_upload import push
from retrain.use.whole_model import WholeModel, lines_of, refuse_existing, usage_error

TRANSFORMERS = "transformers"
MERGED_TYPES = ("bf16", "fp32")
TYPES = {TRANSFORMERS: MERGED_TYPES, "gguf": ("f32", "f16", "bf16", "q8_0"), "mlx": MERGED_TYPES, "vllm": MERGED_TYPES}
GGUF_FILE = "model.gguf"  # as the backend names it
MLX_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# vLLM accepts only these values for --max-lora-rank.
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
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
Exit codes: 0 done; 1 the written model differs from the trained one, so nothing is kept, or the upload failed; 2 usage
            or configuration error.
"""


@click.command("export", epilog=EPILOG)
@subject_argument()
@click.option("--format", "form", type=click.Choice(list(TYPES)), help="Which program is to load or run it.")
@click.option("--out", type=click.Path(path_type=Path), help="A new file for gguf, otherwise a new or empty folder.")
@click.option("--dtype", default="", help="Of the weights: f32, f16, bf16 or q8_0 in GGUF, otherwise bf16 or fp32.")
@checkpoint_option()
@click.option("--no-check", is_flag=True, help="Do not compare logits (this loads one model after the other).")
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
    """Write SUBJECT, a run, an adapter or a model, for transformers, llama.cpp (GGUF), MLX or vLLM, and say how to run
    it; or push it to the Hugging Face hub.

    Its adapter is merged into its base, and the logits of the result are compared with base and adapter before it
    appears; vLLM needs neither for a LoRA adapter.

    --push uploads the adapter, or with --format transformers whole weights, with a model card (data, reward, curves,
    held-out figures) and the configuration that repeats the run. The folder holds no secret and no path of this
    machine. The token is the one that `hf auth login` stored.
    """
    _check_options(form, out, dtype, repo, is_push_option=private or dry_run)
    found = find_subject(subject, checkpoint)
    config = subject_config(found, plugins).config
    whole = WholeModel(subject=found, config=config, plugins=plugins, dtype=dtype, with_check=not no_check)
    if repo:
        data, lines = push(whole, repo, merged=form == TRANSFORMERS, private=private, dry_run=dry_run, out=out)
    else:
        data, lines = _export(whole, form or "", out)
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
        known = ", ".join(TYPES[form])
        raise usage_error(code="export.bad-dtype", what=f"{form} has no --dtype {dtype}", fix=f"give one of {known}")
    if out is None and form != "vllm" and not repo:
        raise usage_error(code="export.needs-out", what=f"--format {form} needs --out", fix="add --out PATH")
    if form == "mlx" and importlib.util.find_spec("mlx_lm") is None:
        what = "mlx-lm, whose converter writes MLX models, is missing"
        raise usage_error(code="export.mlx-missing", what=what, fix="pip install mlx-lm")


def _export(whole: WholeModel, form: str, out: Path | None) -> tuple[dict[str, Any], list[str]]:
    if out is None:  # vLLM's only
        base = whole.located_base
        words = ["vllm", "serve", whole.plugins.locate_model(base) or base]
        if adapter := whole.adapter:
            document = read_object(adapter / ADAPTER_CONFIG)
            rank = int(document.get("r", 0))
            fits = next((known for known in VLLM_RANKS if known >= rank), None)
            if document.get("use_dora") or fits is None:
                kind = "DoRA" if document.get("use_dora") else f"an adapter of rank {rank}"
                what = f"vLLM does not serve {kind}, so it has to be merged"
                raise usage_error(code="export.needs-merging", what=what, fix="add --out DIR")
            name = (whole.subject.run or adapter).resolve().name
            words += ["--enable-lora", "--max-lora-rank", str(fits), "--lora-modules", f"{name}={adapter.resolve()}"]
        run = shlex.join(words)
        data: dict[str, Any] = {"format": "vllm", "subject": whole.subject.named, "run": run}
        data["lines"] = [f"{whole.subject.label}: nothing to write"]
        return data, [*data["lines"], "run it:", f"  {run}"]
    where = shlex.quote(str(out))
    purpose, run = "run it:", f"vllm serve {where}"
    if form == "gguf":
        refuse_existing(out, or_empty_folder=False)
        folder = out.with_name(f".{out.name}.folder")
        # A killed export may have left it.
        shutil.rmtree(folder, ignore_errors=True)
        written, run = whole.write(folder, "gguf"), f"llama-cli -m {where} -cnv"
        (folder / GGUF_FILE).rename(out)
        folder.rmdir()
    elif form == "mlx":
        written, run = _write_mlx(whole, out), f"mlx_lm.chat --model {where}"
    else:
        written = whole.write(out, "folder")
        if form == TRANSFORMERS:
            purpose, run = "train on from it:", f"{program()} --model {where}"
    lines = lines_of(whole, out, written)
    return {**whole.as_data(out, written), "run": run, "lines": lines}, [*lines, purpose, f"  {run}"]


def _write_mlx(whole: WholeModel, out: Path) -> ExportedModel:
    """Write a folder by mlx-lm's own converter, from a temporary merged one."""
    refuse_existing(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        merged, made = Path(scratch) / "merged", Path(scratch) / "mlx"
        written = whole.write(merged, "folder")
        convert = [sys.executable, "-m", "mlx_lm", "convert", "--hf-path", str(merged), "--mlx-path", str(made)]
        convert += ["--dtype", MLX_DTYPES[whole.dtype]] if whole.dtype else []
        # The merged folder is complete, so nothing may come from the hub.
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(convert, capture_output=True, text=True, check=False, env=environ)
        if done.returncode or not made.is_dir():
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            fix = "upgrade mlx-lm, since a newer version may support this model; nothing was kept"
            what = "the converter of mlx-lm failed"
            raise BackendError(Problem(code="export.converter-failed", where=str(out), what=what, why=why, fix=fix))
        if out.is_dir():
            out.rmdir()
        made.rename(out)
    return written
