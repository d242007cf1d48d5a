"""The written files: `trainer.toml`, `inference.toml`, and `start.md` with the commands that start everything."""

from __future__ import annotations

import shlex
from pathlib import Path

import tomlkit

from retrain_prime_rl.config.layout import WILDCARDS, Layout, Server

CHECKED = "PRIME-RL v0.8.1.dev3 to dev67"  # whose configuration models take these files
NONE = '"None"'  # how its files spell null


def trainer_toml(layout: Layout) -> str:
    """The trainer's file: its values are those that `config.toml` of the run records."""
    config, options, machines = layout.config, layout.options, layout.machines
    parts = [
        f"# PRIME-RL's trainer for the run of {_quoted(config.source)}, by `retrain prime-rl-config`; {CHECKED}.",
        "# Values are those that the run records; comments are what it cannot say, at the trainer's default.",
        *(
            ["# Of an adapter's rank and learning rate in those records nothing is true."]
            if machines.all_weights
            else []
        ),
        f"output_dir = {_quoted(str(layout.output_dir))}",
        "# max_steps stays unset: the run decides when it ends.",
        "",
        "[model]",
        f"name = {_quoted(layout.model)}",
        f"seq_len = {options.seq_len}",
        *(["trust_remote_code = true"] if config.model.trust_remote_code else []),
        f"cp = {machines.context_parallel}" if machines.context_parallel > 1 else "# cp = 1",
        '# attn = "auto", impl = "auto", optimization_dtype = "float32"',
        "",
        *_weights(layout),
        "# The loss: `retrain explain` says what the default is.",
        "# [loss]",
        '# type = "default"',
        "",
        "[scheduler]",
        'type = "constant"',
        "",
        *_transport(layout),
        "# Over the file system, because that is where the run reads them; nccl and nixl cannot be read.",
        "[weight_broadcast]",
        'type = "filesystem"',
        "",
        *_checkpoints(layout),
    ]
    return "\n".join(parts) + "\n"


def inference_toml(layout: Layout) -> str:
    """The inference server's file, for each of the servers that the run names."""
    config, first = layout.config, layout.servers[0]
    host = "127.0.0.1" if all(server.is_local for server in layout.servers) else "0.0.0.0"
    lora = [
        "# Without adapters all weights are loaded: /update_weights reads the trainer's broadcasts.",
        "# enable_lora = false",
    ]
    if not layout.machines.all_weights:
        lora = ["enable_lora = true", f"max_lora_rank = {config.model.lora_rank}"]
    router = ["# No router: requests and weights of the run go to the server itself.", f"router = {NONE}"]
    if layout.backend_port:
        router = ["# Where the engine takes weights, behind the router.", f"backend_port = {layout.backend_port}"]
    gpus = layout.machines.inference_gpus
    parts = [
        f"# PRIME-RL's server for the run of {_quoted(config.source)}, by `retrain prime-rl-config`; {CHECKED}.",
        *router,
        "",
        "[server]",
        f'host = "{host}"',
        f"port = {first.port}",
        "",
        "[vllm]",
        f"model = {_quoted(layout.model)}",
        *(["trust_remote_code = true"] if config.model.trust_remote_code else []),
        f"max_model_len = {layout.options.seq_len}",
        "# The distribution that is sampled from, with the temperature in it, is the one that is trained on.",
        'logprobs_mode = "processed_logprobs"',
        f"data_parallel_size = {gpus}" if gpus > 1 else "# data_parallel_size = 1",
        '# tensor_parallel_size = 1, gpu_memory_utilization = 0.9, dtype = "auto"',
        *lora,
        "",
        "[weight_broadcast]",
        'type = "filesystem"',
    ]
    return "\n".join(parts) + "\n"


def _weights(layout: Layout) -> list[str]:
    """Adapter and optimizer; for all weights the rate is the trainer's, since the run's default is an adapter's."""
    config = layout.config
    training, optimizer = config.training, config.optimizer
    lora = [
        "[model.lora]",
        f"rank = {config.model.lora_rank}",
        f"alpha = {layout.lora_alpha}",
        "# target_modules: the linear layers of attention and MLP",
        "",
    ]
    rate = f"lr = {training.lr}"
    if layout.machines.all_weights:
        lora = ["# No [model.lora]: all weights are trained.", ""]
        rate = f"# lr = 1e-6: the run's {training.lr} is meant for adapters"
    return [
        *lora,
        "[optim]",
        'type = "adamw"',
        rate,
        f"weight_decay = {training.weight_decay}",
        f"betas1 = {optimizer.beta1}",
        f"betas2 = {optimizer.beta2}",
        f"max_norm = {optimizer.grad_clip_norm or NONE}",
        "",
    ]


def _transport(layout: Layout) -> list[str]:
    options = layout.options
    if options.transport == "filesystem":
        return ["# Its own default is zmq.", "[rollout_transport]", 'type = "filesystem"', ""]
    note = "# The machine of the run, where it is another one."
    return [
        "[rollout_transport]",
        'type = "zmq"',
        *([note] if options.zmq_host in WILDCARDS else []),
        f"host = {_quoted(layout.trainer_host)}",
        f"port = {options.zmq_port}",
        f"hwm = {options.zmq_hwm}",
        "",
    ]


def _checkpoints(layout: Layout) -> list[str]:
    """Checkpoints of the trainer after the same steps as those of the run."""
    training = layout.config.training
    if not training.save_every:
        return ["# [training] save_every = 0: the run saves its end alone, and the trainer nothing.", "# [ckpt]"]
    keeps_newest = training.keep_last and not training.keep_best
    return [
        f"# Every {training.save_every} steps of the run, as its own.",
        "[ckpt]",
        f"interval = {training.save_every * layout.updates}",
        f"keep_last = {training.keep_last}" if keeps_newest else "# keep_last: all of them stay",
    ]


def _quoted(text: str) -> str:
    """A string of TOML on one line, whatever is in it."""
    return tomlkit.item(text).as_string()


TRAINER, INFERENCE = "trainer.toml", "inference.toml"
RENDEZVOUS_PORT = 29500
# as PRIME-RL's own launcher starts it
TORCHRUN = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True uv run torchrun"
MODULE = "-m prime_rl.trainer.rl.train"


def start_md(layout: Layout, folder: Path) -> str:
    """Markdown whose lines are typed as they stand, but for the words in capitals that the text explains."""
    wait = f"`sync_wait_s = {layout.options.sync_wait_s:g}` seconds is what a step of the trainer may take"
    parts = [
        f"# PRIME-RL for `{_run(layout)}`",
        "",
        "`uv run` is typed in a checkout of PRIME-RL, `retrain` in the folder of the run, and last: the server must",
        f"answer by then. {wait}; the",
        "first one includes what is left of its start. The trainer's loss is in its own records,",
        f"`{layout.output_dir / 'metrics.jsonl'}` since v0.8.1.dev30; that of the run is a placeholder.",
        "",
        *_one_machine(layout, folder),
        *_several_machines(layout, folder),
        *_after_a_stop(layout),
    ]
    return "\n".join(parts) + "\n"


def _one_machine(layout: Layout, folder: Path) -> list[str]:
    each, count, train = layout.machines.inference_gpus, len(layout.servers), layout.train_gpus
    needed, title = count * each + train, ["## One machine", ""]
    if needed > layout.machines.gpus_per_node:
        return [*title, f"It takes {needed} GPUs, and a machine has {layout.machines.gpus_per_node}.", ""]
    lines = [
        f"{_visible(number * each, each)} {_serve(layout, server, folder)}"
        for number, server in enumerate(layout.servers)
    ]
    lines.append(f"{_visible(count * each, train)} {TORCHRUN} --nproc-per-node={train} {_train(folder)}")
    elsewhere = [server.host for server in layout.servers if not server.is_local]
    condition = f", with localhost instead of {', '.join(elsewhere)} in `[inference] url`" if elsewhere else ""
    return [*title, f"{needed} GPUs{condition}. A terminal for each line:", "", *_block([*lines, _run(layout)])]


def _several_machines(layout: Layout, folder: Path) -> list[str]:
    nodes, per_node = layout.nodes, min(layout.train_gpus, layout.machines.gpus_per_node)
    text = [f"`{layout.output_dir}` and both files are on a disk that all share."]
    joined = sockets = ""
    if nodes > 1:
        text.append(f"`torchrun` is typed on each of the trainer's {nodes} machines; HEAD is the first of them.")
        joined = f" --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HEAD:{RENDEZVOUS_PORT}"
    if layout.config.inference.admin_url and not layout.backend_port:
        text.append("`[inference] url` is a router of yours before these servers.")
    if layout.options.transport == "zmq" and layout.trainer_host == "localhost":
        text.append('RUN is the machine of the run, with `zmq_host = "0.0.0.0"` in its `[backend.options]`.')
        sockets = " --rollout_transport.host RUN"
    if any(server.is_local for server in layout.servers):
        text.append("`[inference] url` names localhost: put the server's machine there and write the files again.")
    else:
        text.append(
            "A server takes requests and weights from everybody who reaches it: keep its port off open networks."
        )
    lines = [
        *(f"{_serve(layout, server, folder)}  # on {server.host}" for server in layout.servers),
        f"{TORCHRUN}{joined} --nproc-per-node={per_node} {_train(folder)}{sockets}",
        _run(layout),
    ]
    return ["## Several machines", "", *text, "", *_block(lines)]


def _after_a_stop(layout: Layout) -> list[str]:
    resume = f"retrain --resume {shlex.quote(layout.config.logging.log_dir)}"
    text = [
        "## After a stop",
        "",
        "When the run is done, the trainer waits for another step: stop it. Where only the run was stopped, the",
        f"trainer stays as it is, and `{resume}` goes on.",
        "",
    ]
    if not layout.config.training.save_every:
        return [*text, "The trainer saves no checkpoints (`save_every = 0`): where it was stopped, begin anew."]
    if layout.options.transport == "filesystem":
        text += [
            "Where the trainer was stopped, its line with `--resume` at the end goes on from its newest checkpoint",
            "(before v0.8.1.dev26 `--ckpt.resume-step STEP`) and reads the batches since then again. Further back:",
            "",
        ]
    return [
        *text,
        f"STEP is the checkpoint to start from, in `{layout.output_dir / 'checkpoints'}`. Remove later steps from",
        "`rollouts/` and `broadcasts/` beside it, put `--resume.step STEP` behind the trainer's line (before",
        "v0.8.1.dev26 `--ckpt.resume-step STEP`), and tell the run which step is next, NEXT = STEP + 1:",
        "",
        *_block([f"{resume} --set backend.options.first_step=NEXT"]),
    ]


def _serve(layout: Layout, server: Server, folder: Path) -> str:
    port = "" if server.port == layout.servers[0].port else f" --server.port {server.port}"
    return f"uv run inference @ {_file(folder, INFERENCE)}{port}"


def _train(folder: Path) -> str:
    return f"{MODULE} @ {_file(folder, TRAINER)}"


def _run(layout: Layout) -> str:
    return shlex.join(["retrain", *layout.arguments])


def _file(folder: Path, name: str) -> str:
    return shlex.quote(str(folder.resolve() / name))


def _visible(first: int, count: int) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(str(number) for number in range(first, first + count))}"


def _block(lines: list[str]) -> list[str]:
    return ["```bash", *lines, "```", ""]
