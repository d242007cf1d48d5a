"""`[backend.options]` of the prime_rl backend."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import model_validator

from retrain.advantages import TransformSpec
from retrain.api import Config, ConfigError, Kind, Plugins, Problem, RetrainError, Table, key, resolve

PADDING = "must be a multiple of pad_to_multiple_of, or a full micro-batch could not be padded"
ENGINE = "vllm"
CUSTOM = 'write it for the trainer and name it in its own TOML: [loss] type = "custom", import_path = "MODULE.FUNCTION"'
# Keys that PRIME-RL's trainer reads from its own TOML, and what to set there (in one TOML for all of PRIME-RL the
# tables are [trainer.optim] and so on); a run must not record values that were never used.
TRAINERS_OWN = {
    "training.lr": "set [optim] lr in the trainer's own TOML",
    "training.weight_decay": "set [optim] weight_decay in the trainer's own TOML",
    "model.lora_rank": "set [model.lora] rank in the trainer's own TOML, or no [model.lora] to train all weights",
    "lora.alpha": "set [model.lora] alpha in the trainer's own TOML",
    "optimizer.beta1": "set [optim] betas1 in the trainer's own TOML",
    "optimizer.beta2": "set [optim] betas2 in the trainer's own TOML",
    "optimizer.eps": "the trainer has no key for it",
    "optimizer.grad_clip_norm": "set [optim] max_norm in the trainer's own TOML",
    "optimizer.schedule": "set [scheduler] type in the trainer's own TOML",
    "optimizer.warmup_steps": "set [scheduler] warmup_steps in the trainer's own TOML",
    "optimizer.min_lr_ratio": "set [scheduler] min_lr in the trainer's own TOML",
    "algorithm.loss": CUSTOM,
    "algorithm.loss_params": "set [loss.kwargs] in the trainer's own TOML, for a loss of type custom",
    "algorithm.clip_eps": CUSTOM,
    "algorithm.clip_eps_high": CUSTOM,
    "algorithm.dual_clip": CUSTOM,
    "algorithm.level": CUSTOM,
    "algorithm.aggregation": "the trainer divides by the tokens of the step, as token_mean does",
    "algorithm.tis_cap": CUSTOM,
    "algorithm.is_level": CUSTOM,
    "algorithm.is_mode": CUSTOM,
    "algorithm.is_bounds": CUSTOM,
    "algorithm.off_policy_mask": CUSTOM,
}
ITS_WAY = {"algorithm.aggregation": "token_mean"}  # the trainer's fixed behaviour
RECIPE = "recipe"
BESIDE_A_RECIPE = (
    'write loss = "importance_sampling" and aggregation = "token_mean" next to the recipe (for icepop also is_mode = '
    '"truncate" and is_bounds = []): the rest of it works here, and the loss comes from the trainer\'s own TOML, [loss]'
)


class PrimeRlOptions(Table):
    """Access to a PRIME-RL trainer; `seq_len`, ranks, padding, ports and folder must match its own TOML."""

    output_dir: str = key(
        "", "PRIME-RL's output_dir, on a disk shared with its trainer; empty = [backend] adapter_path.", is_path=True
    )
    transport: Literal["filesystem", "zmq"] = key("filesystem", "Transport of batches: filesystem or zmq.")
    wire: Literal["per_token", "scalar"] = key(
        "per_token", "per_token: PRIME-RL v0.8.1.dev3 or later; scalar: one advantage per sample, 0.4 and 0.5."
    )
    seq_len: int = key(2048, "Maximum tokens of a micro-batch; prompt and completion must fit together.", ge=2)
    data_world_size: int = key(1, "Data-parallel ranks of the trainer (per_token wire).", ge=1)
    pad_to_multiple_of: int = key(1, "Pad micro-batches to a multiple of this many tokens (per_token wire).", ge=1)
    zmq_host: str = key(
        "localhost", "Address to bind (per_token) or to connect to (scalar).", min_length=1, free_on_resume=True
    )
    zmq_port: int = key(
        5555,
        "Port of the batches; the next one collects the ranks that are ready.",
        ge=1,
        le=65534,
        free_on_resume=True,
    )
    zmq_hwm: int = key(10, "Messages that may queue up in a socket.", ge=1, free_on_resume=True)
    strict_advantages: bool = key(True, "Refuse credit that varies within a sample if the wire carries one number.")
    ready_wait_s: float = key(
        600.0, "Seconds to wait until every rank is ready to receive (zmq).", ge=0.0, free_on_resume=True
    )
    sync_wait_s: float = key(
        30.0, "Seconds to wait for the weights of a step after it was sent.", ge=0.0, free_on_resume=True
    )
    sync_poll_s: float = key(0.2, "Seconds between two checks for them.", gt=0.0, free_on_resume=True)
    sync_timeout: Literal["error", "stale"] = key(
        "error", "If they do not arrive: stop, or continue with older weights and count the step."
    )
    first_step: int = key(
        -1, "The step that the trainer waits for, by its count; -1 = found from output_dir.", ge=-1, free_on_resume=True
    )

    @property
    def counts_from(self) -> int:
        """The number of the trainer's first step: 1, and 0 on the older wire."""
        return 1 if self.wire == "per_token" else 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.strict_advantages:
            raise ValueError('strict_advantages = false would train on averages; use wire = "per_token" instead')
        if self.wire == "per_token" and self.seq_len % self.pad_to_multiple_of:
            raise ValueError(f"seq_len = {self.seq_len} {PADDING} = {self.pad_to_multiple_of}")
        if self.first_step == 0 and self.counts_from:
            raise ValueError("first_step = 0: the trainer counts its steps from 1")
        return self


def problems_of(config: Config, plugins: Plugins, options: PrimeRlOptions) -> list[Problem]:
    found = _credit(config, plugins, options)
    for path, there in TRAINERS_OWN.items():
        table, _, key_name = path.partition(".")
        default = getattr(type(config.tables[table])(), key_name, None)  # None: not registered by this core
        value = getattr(config.tables[table], key_name, default)
        if value not in (default, ITS_WAY.get(path, default)):
            what = f"{key_name} = {value!r} would have no effect: the trainer has its own configuration"
            is_of_recipe = str(config.origin(path).layer) == RECIPE
            fix = BESIDE_A_RECIPE if is_of_recipe else f"remove it here; {there}"
            found.append(Problem(code="prime-rl.key-without-effect", where=config.place(path), what=what, fix=fix))
    if (name := config.inference.engine) != ENGINE:
        what = f"engine = {name!r}, but completions come from PRIME-RL's inference server, a vLLM"
        fix = f'set engine = "{ENGINE}"'
        found.append(Problem(code="prime-rl.other-engine", where=config.place("inference.engine"), what=what, fix=fix))
    if (tokens := config.training.max_tokens) >= options.seq_len:
        what = f"max_tokens = {tokens} leaves no room for a prompt in seq_len = {options.seq_len}"
        fix = "raise [backend.options] seq_len, and the trainer's, or lower max_tokens"
        found.append(Problem(code="prime-rl.no-room", where=config.place("training.max_tokens"), what=what, fix=fix))
    try:
        output_folder(config, options)
    except ConfigError as error:
        found += error.problems
    return found


def output_folder(config: Config, options: PrimeRlOptions) -> Path:
    """Return PRIME-RL's folder, as the trainer sees it; ConfigError when none is given."""
    given = options.output_dir or config.backend.adapter_path
    if not given:
        where, what = config.place("backend.options"), "backend 'prime_rl' needs output_dir"
        fix = 'set output_dir = "..." to the output_dir of the trainer, on a disk that both can reach'
        raise ConfigError(Problem(code="prime-rl.no-output-dir", where=where, what=what, fix=fix))
    return Path(given).expanduser().resolve()


def _credit(config: Config, plugins: Plugins, options: PrimeRlOptions) -> list[Problem]:
    """Report token-level credit on the older wire if names reveal it; the rest is checked when a step is sent."""
    algorithm = config.algorithm
    if options.wire != "scalar" or algorithm.algorithm_mode:
        return []
    where, name = config.place("algorithm.transform_mode"), algorithm.transform_mode
    try:
        search_paths = config.plugins.search_paths
        found = resolve(plugins, Kind.TRANSFORM, name, where=where, search_paths=search_paths).target
    except RetrainError:
        return []  # reported by the kernel
    if not (isinstance(found, TransformSpec) and found.use_gtpo):
        return []
    what = f'{name!r} credits the tokens of one completion differently, and wire = "scalar" carries one number'
    fix = 'use wire = "per_token" with PRIME-RL 0.8, or transform_mode = "none"'
    return [Problem(code="prime-rl.token-credit", where=where, what=what, fix=fix)]
