"""`retrain capacity CONFIG`: memory and time, before the run."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from retrain.kernel.config.resolved import DEFAULT_ORIGIN
from retrain.kernel.config.schema import ModelTable
from retrain.kernel.errors import BackendError, ConfigError, Problem, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Owner, Plugins
from retrain.records.run import Run
from retrain.run.configure import DEFAULT_FILE, load_checked, refuse_defaults
from retrain.text.command_options import config_argument, json_option
from retrain.text.tables import table_lines
from retrain.tools import capacity
from retrain.tools.capacity.advice import NO_KEY
from retrain.tools.capacity.forecast import Past, eval_completion_s, forecast
from retrain.tools.capacity.shapes import document_of
from retrain.tools.capacity.show import CARDS_GIB, as_data, known_models, options, smaller_model, text, verdict

SIZE = click.IntRange(min=1)
GPU_HELP = "On CUDA GPUs of this memory, here or not: fits or not, and the key to change."
EPILOG = """\b
Examples:
  retrain capacity                        ./retrain.toml on this machine
  retrain capacity --batch-size 16        with one value changed
  retrain capacity my.toml --pilot 2      measured over two real steps
  retrain capacity --gpu-memory 24 --model Qwen/Qwen3-8B     would it fit a GPU that is not here?
  retrain capacity --gpu-memory 24 --layers 36 --hidden 4096 --inner 12288 --heads 32 --kv-heads 8 --vocabulary 151936
  retrain capacity --known-models --max-tokens 4096          the models that fit 16, 24, 48 and 80 GiB

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
@click.option("--head-size", type=SIZE, help="Width of a head (default: hidden / heads).")
@click.option("--vocabulary", type=SIZE, help="Entries of its vocabulary.")
@click.option("--context", type=SIZE, help="Its longest row in tokens (default: unlimited).")
@click.option("--tied", is_flag=True, help="Its head is its embedding.")
@click.option("--known-models", "is_catalogue", is_flag=True, help="List the models of known size and exit.")
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
    is_catalogue: bool,
    as_json: bool,
    arguments: tuple[str, ...],
    **sizes: int | bool | None,
) -> None:
    """Estimate how much memory and time CONFIG with its overrides needs here, without loading the model.

    With --gpu-memory: on a GPU that this machine need not have.
    """
    if pilot and gpu_memory:
        what, fix = "--pilot measures this machine, --gpu-memory is about another", "give one of them"
        raise ConfigError(Problem(code="capacity.two-machines", where="--pilot --gpu-memory", what=what, fix=fix))
    is_about_gpus = gpu_memory or is_catalogue
    if is_about_gpus and not arguments and not DEFAULT_FILE.is_file():
        arguments = ("--model", ModelTable().model)  # a question about a GPU needs no file
    config, prompt = load_checked(arguments, plugins, will_run=bool(pilot)).config, prompt_tokens or 0
    if pilot or not (is_about_gpus or any(sizes.values()) or config.origin("model.model") != DEFAULT_ORIGIN):
        refuse_defaults(config, arguments)
    if is_catalogue:
        cards = [gpu_memory] if gpu_memory else CARDS_GIB
        rows = known_models(config, plugins, prompt_tokens=prompt, cards=cards)
        lines = table_lines(list(rows[0]), (list(row.values()) for row in rows), num_names=len(rows[0]))
        click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines))
        return
    past = run_pilot(arguments, pilot) if pilot else None
    gpu_bytes, document = int(gpu_memory * 2**30) if gpu_memory else None, document_of(sizes)
    found = forecast(config, plugins, prompt_tokens=prompt, fetch=True, past=past, gpu_bytes=gpu_bytes, sizes=document)
    if as_json:
        data = as_data(found)
        if gpu_bytes:
            data |= {"gpu_memory_bytes": found.limit_bytes, "fits": not found.advice}
            data["options"] = [asdict(option) for option in options(found)]
        click.echo(json.dumps(data, indent=2, allow_nan=False))
    elif gpu_bytes:
        name = "the model" if document else config.model.model
        near = smaller_model(config, plugins, found) if found.advice == NO_KEY else ""
        click.echo(f"{verdict(found, name, near)}\n\n{text(found, has_time=False)}")
    else:
        click.echo(text(found))


# The pilot: a few real steps in another process, `python -m retrain.tools.capacity.command [CONFIG] [overrides]`.


TAIL_LINES = 12
# A pilot leaves nothing behind: no records, no checkpoint, nothing sent. Every step has the same size.
QUIET = (
    *("--eval-examples", "0", "--save-every", "0", "--set", "backend.adapter_path=", "--set", "logging.recorders=[]"),
    *("--wandb-project", "", "--set", "resume.from="),
)


def run_pilot(arguments: Sequence[str], steps: int) -> Past:
    """Measure `steps` steps of `[CONFIG] [overrides]`; BackendError with the end of the output if the pilot fails."""
    with tempfile.TemporaryDirectory(prefix="retrain-pilot-") as temporary:
        log_dir = Path(temporary) / "run"
        own = ["--max-steps", str(steps), "--log-dir", str(log_dir), *QUIET]
        command = [sys.executable, "-m", "retrain.tools.capacity.command", *arguments, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-TAIL_LINES:])
            where, fix = "capacity --pilot", "correct the error above, and run the pilot again"
            what = f"the pilot of {steps} steps failed with exit code {done.returncode}"
            raise BackendError(Problem(code="capacity.pilot-failed", where=where, what=what, why=tail, fix=fix))
        manifest = Run(Path(log_dir)).started_manifest()
    measured = manifest["capacity"]["measured"]
    return Past(
        runs=1,
        median_step_time_s=measured.get("median_step_time_s"),
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        memory_at_start_bytes=measured.get("memory_at_start_bytes"),
        prompt_tokens=measured.get("longest_prompt_tokens"),
        eval_completion_s=eval_completion_s(measured, manifest["config"]),
    )


def main(arguments: list[str]) -> int:
    plugins = load_plugins()
    if not plugins.pluggy.is_registered(capacity):
        plugins.add(capacity, Owner(distribution="retrain-core", source="retrain.tools.capacity"))
    try:
        checked = load_checked(arguments, plugins)
        from retrain.run.session import train

        train(checked, plugins)
    except RetrainError as error:
        print(f"{error.label}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
