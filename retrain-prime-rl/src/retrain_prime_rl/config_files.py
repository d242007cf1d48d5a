"""`retrain prime-rl-config` writes `trainer.toml`, `inference.toml`, and `start.md` with the commands to start them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import jinja2
import tomlkit

from retrain.api import Config, ConfigError, Plugins, Problem, load_checked
from retrain_prime_rl.options import PrimeRlOptions, output_folder

TRAINER, INFERENCE, START = "trainer.toml", "inference.toml", "start.md"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"0.0.0.0", "*", "::"})
EPILOG = """\b
Examples:
  retrain prime-rl-config prime_rl.toml                        LoRA, one GPU samples
  retrain prime-rl-config prime_rl.toml --all-weights --out full

\b
Exit codes: 0 done; 2 usage or configuration error.
"""


def written(layout: Layout, folder: Path) -> dict[str, str]:
    def serve(server: Server) -> str:
        port = "" if server.port == layout.servers[0].port else f" --server.port {server.port}"
        return f"uv run inference @ {shlex.quote(str(folder.resolve() / INFERENCE))}{port}"

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("retrain_prime_rl"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "toml": lambda text: tomlkit.item(str(text)).as_string(),  # a string on one line, whatever is in it
        "gpus": lambda first, count: f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(first, first + count)))}",
    }
    remote = [server.host for server in layout.servers if server.host not in LOOPBACK]
    values = {
        "checked": "PRIME-RL v0.8.1.dev3 to dev67",  # whose configuration models take these files
        "layout": layout,
        **{name: getattr(layout, name) for name in ("config", "options", "machines", "output_dir", "model", "servers")},
        "training": layout.config.training,
        "binds_all": layout.options.zmq_host in WILDCARDS,
        "is_bound_here": layout.options.transport == "zmq" and layout.trainer_host == "localhost",
        "all_local": not remote,
        "remote": remote,
        "needed": len(layout.servers) * layout.machines.inference_gpus + layout.train_gpus,
        "run": shlex.join(["retrain", *layout.arguments]),
        "resume": f"retrain --resume {shlex.quote(layout.config.logging.log_dir)}",
        "serve": serve,
        # as PRIME-RL's own launcher starts it
        "torchrun": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True uv run torchrun",
        "train": f"-m prime_rl.trainer.rl.train @ {shlex.quote(str(folder.resolve() / TRAINER))}",
    }
    names = (TRAINER, INFERENCE, START)
    return {name: environment.get_template(f"{name}.jinja").render(values) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """The settings missing from the run's TOML: which weights are trained, and on which GPUs.

    A trainer has `data_world_size` x `context_parallel` GPUs.
    """

    all_weights: bool = False
    inference_gpus: int = 1  # of each server
    context_parallel: int = 1
    gpus_per_node: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An inference server's address as the run reaches it."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    config: Config
    options: PrimeRlOptions
    machines: Machines
    output_dir: Path
    model: str
    servers: tuple[Server, ...]  # that PRIME-RL's `inference` starts
    backend_port: int = 0  # of the one engine behind the router that it also starts; 0 = no router
    arguments: tuple[str, ...] = ()  # of `retrain`, for this run

    @property
    def train_gpus(self) -> int:
        """GPUs of the trainer, on all machines together."""
        return self.options.data_world_size * self.machines.context_parallel

    @property
    def nodes(self) -> int:
        return -(-self.train_gpus // self.machines.gpus_per_node)

    @property
    def updates(self) -> int:
        """Steps of the trainer per step of the run."""
        training = self.config.training
        return min(training.minibatches, training.batch_size) * training.epochs

    @property
    def trainer_host(self) -> str:
        """The address that the trainer connects to, if the run's TOML gives one."""
        return "localhost" if self.options.zmq_host in WILDCARDS | LOOPBACK else self.options.zmq_host


def layout_of(config: Config, plugins: Plugins, machines: Machines, arguments: Sequence[str] = ()) -> Layout:
    """Return the layout of a configuration that `explain` accepts; ConfigError if PRIME-RL's cannot express it."""
    if problems := _problems(config, machines):
        raise ConfigError(*problems)
    options = PrimeRlOptions.model_validate(config.backend.options)
    name = config.model.model
    located = plugins.locate_model(name) or name
    servers = _servers(config.inference.url or "http://localhost:8000")  # the default of engine vllm
    engines = _servers(config.inference.admin_url)
    has_its_router = len(engines) == len(servers) == 1
    return Layout(
        config=config,
        options=options,
        machines=machines,
        output_dir=output_folder(config, options),
        model=str(Path(located).resolve()) if Path(located).is_dir() else located,
        servers=servers if has_its_router else engines or servers,
        backend_port=engines[0].port if has_its_router else 0,
        arguments=tuple(arguments),
    )


def _servers(urls: str) -> tuple[Server, ...]:
    parts = [urlsplit(url.strip()) for url in urls.split(",") if url.strip()]
    return tuple(Server(host=part.hostname or "localhost", port=part.port or 80) for part in parts)


def _problems(config: Config, machines: Machines) -> list[Problem]:
    if config.backend.backend != "prime_rl":
        what = f"backend = {config.backend.backend!r} is not trained by PRIME-RL"
        where, fix = config.place("backend.backend"), 'set backend = "prime_rl"'
        return [Problem(code="prime-rl.other-backend", where=where, what=what, fix=fix)]
    if any(path.startswith("campaign.") and str(found.layer) == "file" for path, found in config.origins.items()):
        what = "a campaign has many runs, and each needs a separate trainer and output_dir"
        return [Problem(code="prime-rl.campaign", where=config.source, what=what, fix="give the file of one run")]
    options, found = PrimeRlOptions.model_validate(config.backend.options), []
    if options.wire == "scalar":
        what = 'wire = "scalar" is for trainers whose configuration files are others'
        fix = 'set wire = "per_token", or write the files of that trainer by hand'
        found.append(Problem(code="prime-rl.old-wire", where=config.place("backend.options"), what=what, fix=fix))
    if options.pad_to_multiple_of % machines.context_parallel:
        what = f"pad_to_multiple_of does not split into {machines.context_parallel} parts"
        fix = f"set pad_to_multiple_of = {machines.context_parallel} in [backend.options]"
        found.append(Problem(code="prime-rl.uneven-padding", where="--context-parallel", what=what, fix=fix))
    gpus = options.data_world_size * machines.context_parallel
    if gpus > machines.gpus_per_node and gpus % machines.gpus_per_node:
        what = f"{gpus} GPUs of the trainer do not fill machines of {machines.gpus_per_node}"
        fix = "set --gpus-per-node, or [backend.options] data_world_size, so that every machine has as many"
        found.append(Problem(code="prime-rl.uneven-machines", where="--gpus-per-node", what=what, fix=fix))
    return found


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

    trainer.toml and inference.toml hold the settings of CONFIG under PRIME-RL's names, so that both sides agree; what
    `retrain explain` refuses is refused here. A file that exists and would change is kept, unless --force is given.
    """
    layout = layout_of(load_checked(arguments, plugins).config, plugins, Machines(**machines), arguments)
    texts = written(layout, out)
    there = [name for name in texts if (out / name).exists()]
    changed = [name for name in there if (out / name).read_text("utf-8") != texts[name]]
    if changed and not force:
        what = f"{', '.join(changed)} would be replaced: written for other settings, or edited"
        fix = "give another --out, or --force to replace them"
        why = "nothing was written"
        raise ConfigError(Problem(code="prime-rl.files-differ", where=str(out), what=what, why=why, fix=fix))
    out.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8")
    click.echo(f"Wrote {', '.join(texts)} in {out}.\n\n{texts[START]}", nl=False)
