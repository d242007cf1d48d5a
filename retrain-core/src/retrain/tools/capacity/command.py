"""`retrain capacity CONFIG`: memory and time, before the run."""

from __future__ import annotations

import json

import click

from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.config.schema import ModelTable
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.run.configure import DEFAULT_FILE, load_checked, refuse_defaults
from retrain.text.command_options import config_argument, json_option
from retrain.text.tables import table_lines
from retrain.tools.capacity import fits
from retrain.tools.capacity.advice import NO_KEY
from retrain.tools.capacity.forecast import forecast
from retrain.tools.capacity.pilot import run_pilot
from retrain.tools.capacity.shapes import document_of
from retrain.tools.capacity.show import as_data, text

SIZE = click.IntRange(min=1)
GPU_HELP = "Ask about CUDA GPUs of this memory, which need not be here: fits or not, and what to change."
EPILOG = """\b
Examples:
  retrain capacity                        ./retrain.toml on this machine
  retrain capacity --batch-size 16        with one value changed
  retrain capacity my.toml --pilot 2      measured over two real steps
  retrain capacity --gpu-memory 24 --model Qwen/Qwen3-8B     would it fit a GPU that is not here?
  retrain capacity --gpu-memory 24 --layers 36 --hidden 4096 --inner 12288 --heads 32 --kv-heads 8 --vocabulary 151936
  retrain capacity --known-models --max-tokens 4096          what fits on 16, 24, 48 and 80 GiB

\b
Exit codes: 0 done; 1 a pilot failed; 2 usage or configuration error.
"""


@click.command(
    "capacity", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True}, epilog=EPILOG
)
@click.option("--pilot", type=click.IntRange(min=1), metavar="N", help="Measure N real steps; nothing is kept of them.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=None, help="Length of the longest prompt.")
@click.option("--gpu-memory", type=click.FloatRange(min=0.1, max=4096), metavar="GIB", help=GPU_HELP)
@click.option("--layers", type=SIZE, help="Layers of a model whose config.json is not at hand; then --hidden as well.")
@click.option("--hidden", type=SIZE, help="Width of its residual stream.")
@click.option("--inner", type=SIZE, help="Width inside its MLP (default: 4 x hidden).")
@click.option("--heads", type=SIZE, help="Its attention heads.")
@click.option("--kv-heads", type=SIZE, help="Its key-value heads (default: as many as heads).")
@click.option("--head-size", type=SIZE, help="Numbers of a head (default: hidden / heads).")
@click.option("--vocabulary", type=SIZE, help="Entries of its vocabulary.")
@click.option("--context", type=SIZE, help="Its longest row in tokens (default: unlimited).")
@click.option("--tied", is_flag=True, help="Its head is its embedding.")
@click.option("--known-models", is_flag=True, help="A line for every model of known size, and exit.")
@json_option()
@config_argument()
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    *,
    pilot: int | None,
    prompt_tokens: int | None,
    gpu_memory: float | None,
    known_models: bool,
    as_json: bool,
    arguments: tuple[str, ...],
    **sizes: int | bool | None,
) -> None:
    """Estimate how much memory and time CONFIG with its overrides needs here, without loading the model.

    With --gpu-memory: on a GPU that this machine need not have.
    """
    if pilot and gpu_memory:
        what = "--pilot measures this machine, --gpu-memory asks about another"
        raise ConfigError(Problem(where="--pilot --gpu-memory", what=what, fix="give one of them"))
    is_about_gpus = gpu_memory or known_models
    if is_about_gpus and not arguments and not DEFAULT_FILE.is_file():
        arguments = ("--model", ModelTable().model)  # a question about a GPU needs no file
    config, prompt = load_checked(arguments, plugins, will_run=bool(pilot)).config, prompt_tokens or 0
    if pilot or not (is_about_gpus or any(sizes.values()) or config.origin("model.model") != DEFAULT_ORIGIN):
        refuse_defaults(config, arguments)
    if known_models:
        rows = fits.known_models(
            config, plugins, prompt_tokens=prompt, cards=[gpu_memory] if gpu_memory else fits.CARDS_GIB
        )
        lines = table_lines(list(rows[0]), (list(row.values()) for row in rows), num_names=len(rows[0]))
        click.echo(_as_json(rows) if as_json else "\n".join(lines))
        return
    past = run_pilot(arguments, pilot) if pilot else None
    gpu_bytes, document = int(gpu_memory * 2**30) if gpu_memory else None, document_of(sizes)
    found = forecast(config, plugins, prompt_tokens=prompt, fetch=True, past=past, gpu_bytes=gpu_bytes, sizes=document)
    if gpu_bytes:
        name = "the model" if document else config.model.model
        near = fits.smaller_model(config, plugins, found) if found.advice == NO_KEY else ""
        click.echo(
            _as_json(fits.as_data(found))
            if as_json
            else f"{fits.verdict(found, name, near)}\n\n{text(found, has_time=False)}"
        )
    else:
        click.echo(_as_json(as_data(found)) if as_json else text(found))


def _as_json(content: object) -> str:
    return json.dumps(content, indent=2, allow_nan=False)
