"""`trainer.toml` and `inference.toml`: what the run says, and in comments what it leaves to PRIME-RL's defaults."""

from __future__ import annotations

import tomlkit

from retrain_prime_rl.config.layout import WILDCARDS, Layout

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
