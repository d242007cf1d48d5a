"""`retrain merge SUBJECT --out DIR`: a trained model as a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

import click

from retrain.kernel.registry import Plugins
from retrain.run.opened import subject_config
from retrain.run.subject import find_subject
from retrain.text.terminal_text import printable
from retrain.use import whole_model

EPILOG = """\b
Examples:
  retrain merge logs/train --out merged
  retrain merge logs/train --checkpoint best --dtype fp32 --out merged
  retrain merge path/to/adapter --out merged --json

\b
Exit codes: 0 done; 1 what was written is not the trained model, so nothing is kept; 2 usage or configuration error.
"""


@click.command("merge", epilog=EPILOG)
@click.argument("subject", metavar="RUN|ADAPTER|MODEL", type=click.Path())
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to write: a new one, or empty.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="Of the weights; by default that of the base.")
@click.option("--checkpoint", default="", metavar="WHICH", help="Of a run: best, final, or a number of steps.")
@click.option("--no-check", is_flag=True, help="Do not compare logits, which loads one model after the other.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def command(
    plugins: Plugins, subject: str, out: Path, dtype: str | None, checkpoint: str, no_check: bool, as_json: bool
) -> None:
    """Write a trained model as a folder that transformers loads: its adapter merged into its base, tokenizer, chat
    template. The logits of the folder are compared with those of base and adapter before it appears."""
    found = find_subject(subject, checkpoint)
    config = subject_config(found, plugins).config
    written = whole_model.write_whole(
        found, config, plugins, out, form="folder", dtype=dtype or "", with_check=not no_check
    )
    if as_json:
        click.echo(json.dumps(whole_model.as_data(found, out, written), indent=2, allow_nan=False))
        return
    click.echo("\n".join(whole_model.lines(found, out, written)))
    click.echo(printable(f"  train on from it: retrain --model {out}"))
