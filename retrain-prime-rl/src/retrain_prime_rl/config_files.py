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
_TRAINER_TOML = """\
# PRIME-RL's trainer for the run of {{ config.source | toml }}, by `retrain prime-rl-config`; {{ checked }}.
# Values are in the records of the run; commented keys, at the trainer's default, are not.
{% if machines.all_weights %}
# Of an adapter's rank and learning rate in those records nothing is true.
{% endif %}
output_dir = {{ output_dir | toml }}
# max_steps stays unset: the run decides when it ends.

[model]
name = {{ model | toml }}
seq_len = {{ options.seq_len }}
{% if config.model.trust_remote_code %}
trust_remote_code = true
{% endif %}
{{ "" if machines.context_parallel > 1 else "# " }}cp = {{ machines.context_parallel }}
# attn = "auto", impl = "auto", optimization_dtype = "float32"

{% if machines.all_weights %}
# No [model.lora]: all weights are trained.
{% else %}
[model.lora]
rank = {{ config.model.lora_rank }}
alpha = {{ config.lora.alpha or 2 * config.model.lora_rank }}
# target_modules: the linear layers of attention and MLP
{% endif %}

[optim]
type = "adamw"
{% if machines.all_weights %}
# lr = 1e-6: the run's {{ training.lr }} is meant for adapters
{% else %}
lr = {{ training.lr }}
{% endif %}
weight_decay = {{ training.weight_decay }}
betas1 = {{ config.optimizer.beta1 }}
betas2 = {{ config.optimizer.beta2 }}
max_norm = {{ config.optimizer.grad_clip_norm or '"None"' }}

# The loss: `retrain explain` prints the default.
# [loss]
# type = "default"

[scheduler]
type = "constant"

{% if options.transport == "filesystem" %}
# Its own default is zmq.
[rollout_transport]
type = "filesystem"
{% else %}
[rollout_transport]
type = "zmq"
{% if binds_all %}
# The machine of the run, where it is another one.
{% endif %}
host = {{ layout.trainer_host | toml }}
port = {{ options.zmq_port }}
hwm = {{ options.zmq_hwm }}
{% endif %}

# Over the file system, because that is where the run reads them; nccl and nixl cannot be read.
[weight_broadcast]
type = "filesystem"

{% if training.save_every %}
# Every {{ training.save_every }} steps of the run, as its own.
[ckpt]
interval = {{ training.save_every * layout.updates }}
{% if training.keep_last and not training.keep_best %}
keep_last = {{ training.keep_last }}
{% else %}
# keep_last: all of them stay
{% endif %}
{% else %}
# [training] save_every = 0: the run saves only its end, and the trainer nothing.
# [ckpt]
{% endif %}
"""
_INFERENCE_TOML = """\
# PRIME-RL's server for the run of {{ config.source | toml }}, by `retrain prime-rl-config`; {{ checked }}.
{% if layout.backend_port %}
# Where the engine takes weights, behind the router.
backend_port = {{ layout.backend_port }}
{% else %}
# No router: requests and weights of the run go to the server itself.
router = "None"
{% endif %}

[server]
host = "{{ '127.0.0.1' if all_local else '0.0.0.0' }}"
port = {{ servers[0].port }}

[vllm]
model = {{ model | toml }}
{% if config.model.trust_remote_code %}
trust_remote_code = true
{% endif %}
max_model_len = {{ options.seq_len }}
# The distribution that is sampled from, with the temperature in it, is the one that is trained on.
logprobs_mode = "processed_logprobs"
{{ "" if machines.inference_gpus > 1 else "# " }}data_parallel_size = {{ machines.inference_gpus }}
# tensor_parallel_size = 1, gpu_memory_utilization = 0.9, dtype = "auto"
{% if machines.all_weights %}
# Without adapters all weights are loaded: /update_weights reads the trainer's broadcasts.
# enable_lora = false
{% else %}
enable_lora = true
max_lora_rank = {{ config.model.lora_rank }}
{% endif %}

[weight_broadcast]
type = "filesystem"
"""
_START_MD = """\
# PRIME-RL for `{{ run }}`

`uv run` is typed in a checkout of PRIME-RL, `retrain` in the folder of the run, and last: the server must
answer by then. A step of the trainer may take `sync_wait_s = {{ "%g" % options.sync_wait_s }}` seconds; the
first one includes the rest of its start. The trainer's loss is in its own records,
`{{ output_dir }}/metrics.jsonl` since v0.8.1.dev30; the run's loss is a placeholder.

## One machine

{% if needed > machines.gpus_per_node %}
It takes {{ needed }} GPUs, and a machine has {{ machines.gpus_per_node }}.
{% else %}
{{ needed }} GPUs{% if remote %}, with localhost instead of {{ remote | join(", ") }} in `[inference] url`{% endif %}.\
 A terminal for each line:

```bash
{% for server in servers %}
{{ (loop.index0 * machines.inference_gpus) | gpus(machines.inference_gpus) }} {{ serve(server) }}
{% endfor %}
{{ (servers | length * machines.inference_gpus) | gpus(layout.train_gpus) }} {{ torchrun }}\
 --nproc-per-node={{ layout.train_gpus }} {{ train }}
{{ run }}
```
{% endif %}

## Several machines

`{{ output_dir }}` and both files are on a disk that all share.
{% if layout.nodes > 1 %}
`torchrun` is typed on each of the trainer's {{ layout.nodes }} machines; HEAD is the first of them.
{% endif %}
{% if config.inference.admin_url and not layout.backend_port %}
`[inference] url` is a router of yours before these servers.
{% endif %}
{% if is_bound_here %}
RUN is the machine of the run, with `zmq_host = "0.0.0.0"` in its `[backend.options]`.
{% endif %}
{% if remote | length < servers | length %}
`[inference] url` names localhost: put the server's machine there and write the files again.
{% else %}
A server takes requests and weights from everybody who reaches it: keep its port off open networks.
{% endif %}

```bash
{% for server in servers %}
{{ serve(server) }}  # on {{ server.host }}
{% endfor %}
{{ torchrun }}{% if layout.nodes > 1 %}\
 --nnodes={{ layout.nodes }} --rdzv-backend=c10d --rdzv-endpoint=HEAD:29500{% endif %}\
 --nproc-per-node={{ [layout.train_gpus, machines.gpus_per_node] | min }} {{ train }}\
{{ " --rollout_transport.host RUN" if is_bound_here }}
{{ run }}
```

## After a stop

When the run is done, the trainer waits for another step: stop it. If only the run was stopped, leave the
trainer running, and continue with `{{ resume }}`.

{% if not training.save_every %}
The trainer saves no checkpoints (`save_every = 0`): where it was stopped, begin again.
{% else %}
{% if options.transport == "filesystem" %}
If the trainer was stopped, its line with `--resume` at the end continues from its newest checkpoint
(before v0.8.1.dev26 `--ckpt.resume-step STEP`) and reads the batches since then again. Further back:

{% endif %}
STEP is the checkpoint to start from, in `{{ output_dir }}/checkpoints`. Remove later steps from
`rollouts/` and `broadcasts/` next to it, put `--resume.step STEP` behind the trainer's line (before
v0.8.1.dev26 `--ckpt.resume-step STEP`), and give the run the next step, NEXT = STEP + 1:

```bash
{{ resume }} --set backend.options.first_step=NEXT
```
{% endif %}
"""
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

    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
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
    templates = {TRAINER: _TRAINER_TOML, INFERENCE: _INFERENCE_TOML, START: _START_MD}
    return {name: environment.from_string(text).render(values) for name, text in templates.items()}


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
        return [Problem(where=config.place("backend.backend"), what=what, fix='set backend = "prime_rl"')]
    if any(path.startswith("campaign.") and str(found.layer) == "file" for path, found in config.origins.items()):
        what = "a campaign has many runs, and each needs a separate trainer and output_dir"
        return [Problem(where=config.source, what=what, fix="give the file of one run")]
    options, found = PrimeRlOptions.model_validate(config.backend.options), []
    if options.wire == "scalar":
        what = 'wire = "scalar" is for trainers whose configuration files are others'
        fix = 'set wire = "per_token", or write the files of that trainer by hand'
        found.append(Problem(where=config.place("backend.options"), what=what, fix=fix))
    if options.pad_to_multiple_of % machines.context_parallel:
        what = f"pad_to_multiple_of does not split into {machines.context_parallel} parts"
        fix = f"set pad_to_multiple_of = {machines.context_parallel} in [backend.options]"
        found.append(Problem(where="--context-parallel", what=what, fix=fix))
    gpus = options.data_world_size * machines.context_parallel
    if gpus > machines.gpus_per_node and gpus % machines.gpus_per_node:
        what = f"{gpus} GPUs of the trainer do not fill machines of {machines.gpus_per_node}"
        fix = "set --gpus-per-node, or [backend.options] data_world_size, so that every machine has as many"
        found.append(Problem(where="--gpus-per-node", what=what, fix=fix))
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
