"""The written files: `trainer.toml`, `inference.toml`, and `start.md` with the commands that start everything."""

from __future__ import annotations

import shlex
from pathlib import Path

import jinja2
import tomlkit

from retrain_prime_rl.config.layout import WILDCARDS, Layout, Server

TRAINER, INFERENCE, START = "trainer.toml", "inference.toml", "start.md"
_TRAINER_TOML = """\
# PRIME-RL's trainer for the run of {{ config.source | toml }}, by `retrain prime-rl-config`; {{ checked }}.
# Values are those that the run records; comments are what it cannot say, at the trainer's default.
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

# The loss: `retrain explain` says what the default is.
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
# [training] save_every = 0: the run saves its end alone, and the trainer nothing.
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
answer by then. `sync_wait_s = {{ "%g" % options.sync_wait_s }}` seconds is what a step of the trainer may take; the
first one includes what is left of its start. The trainer's loss is in its own records,
`{{ output_dir }}/metrics.jsonl` since v0.8.1.dev30; that of the run is a placeholder.

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

When the run is done, the trainer waits for another step: stop it. Where only the run was stopped, the
trainer stays as it is, and `{{ resume }}` goes on.

{% if not training.save_every %}
The trainer saves no checkpoints (`save_every = 0`): where it was stopped, begin again.
{% else %}
{% if options.transport == "filesystem" %}
Where the trainer was stopped, its line with `--resume` at the end goes on from its newest checkpoint
(before v0.8.1.dev26 `--ckpt.resume-step STEP`) and reads the batches since then again. Further back:

{% endif %}
STEP is the checkpoint to start from, in `{{ output_dir }}/checkpoints`. Remove later steps from
`rollouts/` and `broadcasts/` beside it, put `--resume.step STEP` behind the trainer's line (before
v0.8.1.dev26 `--ckpt.resume-step STEP`), and tell the run which step is next, NEXT = STEP + 1:

```bash
{{ resume }} --set backend.options.first_step=NEXT
```
{% endif %}
"""


def written(layout: Layout, folder: Path) -> dict[str, str]:
    """The text of every file, by name, for a folder.

    The lines of `start.md` are typed as they are, but for the words in capitals that its text explains.
    """

    def serve(server: Server) -> str:
        port = "" if server.port == layout.servers[0].port else f" --server.port {server.port}"
        return f"uv run inference @ {shlex.quote(str(folder.resolve() / INFERENCE))}{port}"

    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {
        "toml": lambda text: tomlkit.item(str(text)).as_string(),  # a string on one line, whatever is in it
        "gpus": lambda first, count: f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(first, first + count)))}",
    }
    remote = [server.host for server in layout.servers if not server.is_local]
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
