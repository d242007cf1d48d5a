"""`retrain prime-rl-config [CONFIG] [overrides] [--out DIR] ...`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from retrain.api import ConfigError, Plugins, Problem, load_checked
from retrain_prime_rl.config_files import START, Machines, layout_of, written

EPILOG = """\b
Examples:
  retrain prime-rl-config prime_rl.toml                        LoRA, one GPU samples
  retrain prime-rl-config prime_rl.toml --all-weights --out full

\b
Exit codes: 0 done; 2 usage or configuration error.
"""


@click.command("prime-rl-config", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="prime-rl", show_default=True, help="Folder."
)
@click.option("--all-weights", is_flag=True, help="Train all weights instead of an adapter.")
@click.option("--inference-gpus", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs of each server.")
@click.option(
    "--context-parallel", type=click.IntRange(min=1), default=1, show_default=True, help="GPUs that share a sequence."
)
@click.option("--gpus-per-node", type=click.IntRange(min=1), default=8, show_default=True, help="GPUs of a machine.")
@click.option("--force", is_flag=True, help="Replace files that differ.")
@click.argument("arguments", metavar="[CONFIG] [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(plugins: Plugins, /, out: Path, force: bool, arguments: tuple[str, ...], **machines: Any) -> None:
    """Write PRIME-RL's own files for CONFIG, and the commands that start trainer, server and run.

    trainer.toml and inference.toml hold what CONFIG says in PRIME-RL's words, so that both sides agree; what `retrain
    explain` refuses is refused here. A file that exists and would change is kept, unless --force is given.
    """
    layout = layout_of(load_checked(arguments, plugins).config, plugins, Machines(**machines), arguments)
    texts = written(layout, out)
    there = [name for name in texts if (out / name).exists()]
    changed = [name for name in there if (out / name).read_text("utf-8") != texts[name]]
    if changed and not force:
        what = f"{', '.join(changed)} would be replaced: written for other settings, or edited"
        fix = "give another --out, or --force to replace them"
        raise ConfigError(Problem(where=str(out), what=what, why="nothing was written", fix=fix))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    click.echo(f"Wrote {', '.join(texts)} in {out}.\n\n{texts[START]}", nl=False)
