"""Refuses settings that only the trainer's own configuration controls, before anything is sent."""

from __future__ import annotations

from pathlib import Path

from retrain.advantages import TransformSpec
from retrain.api import Config, ConfigError, Kind, Plugins, Problem, RetrainError, resolve
from retrain_prime_rl.options import PrimeRlOptions

ENGINE = "vllm"
CUSTOM = 'write it for the trainer and name it in its own TOML: [loss] type = "custom", import_path = "MODULE.FUNCTION"'
# What PRIME-RL's trainer reads from its own TOML, and what to set there (with one TOML for all of PRIME-RL the tables
# are [trainer.optim] and so on); a run must not record values that were never used.
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
    "algorithm.aggregation": "the trainer divides by the tokens of the step, as token_mean does",
    "algorithm.tis_cap": CUSTOM,
    "algorithm.is_level": CUSTOM,
    "algorithm.is_mode": CUSTOM,
    "algorithm.is_bounds": CUSTOM,
}
ITS_WAY = {"algorithm.aggregation": "token_mean"}  # what the trainer does anyway
RECIPE = "recipe"
BESIDE_A_RECIPE = (
    'write loss = "importance_sampling" and aggregation = "token_mean" beside the recipe: the rest of it works here, '
    "and the loss is that of the trainer's own TOML, [loss]"
)


def problems_of(config: Config, plugins: Plugins, options: PrimeRlOptions) -> list[Problem]:
    """Every key that would have no effect."""
    found = [*_unread(config), *_engine(config), *_room(config, options), *_credit(config, plugins, options)]
    return found if _output_dir(config, options) else [*found, _no_output_dir(config)]


def output_dir(config: Config, options: PrimeRlOptions) -> Path:
    """PRIME-RL's folder, as the trainer sees it; ConfigError when none is given."""
    given = _output_dir(config, options)
    if not given:
        raise ConfigError(_no_output_dir(config))
    return Path(given).expanduser().resolve()


def _output_dir(config: Config, options: PrimeRlOptions) -> str:
    return options.output_dir or config.backend.adapter_path


def _no_output_dir(config: Config) -> Problem:
    fix = 'set output_dir = "..." to the output_dir of the trainer, on a disk that both can reach'
    return Problem(where=config.place("backend.options"), what="backend 'prime_rl' needs output_dir", fix=fix)


def _unread(config: Config) -> list[Problem]:
    problems = []
    for path, there in TRAINERS_OWN.items():
        table, _, name = path.partition(".")
        default = getattr(type(config.tables[table])(), name, None)  # None: a key of core that is not registered here
        if config.value(path, default) not in (default, ITS_WAY.get(path, default)):
            what = f"{name} = {config.value(path, default)!r} would have no effect: the trainer is configured elsewhere"
            is_of_recipe = str(config.origin(path).layer) == RECIPE
            fix = BESIDE_A_RECIPE if is_of_recipe else f"remove it here; {there}"
            problems.append(Problem(where=config.place(path), what=what, fix=fix))
    return problems


def _engine(config: Config) -> list[Problem]:
    name = config.inference.engine
    if name == ENGINE:
        return []
    what = f"engine = {name!r}, but completions come from PRIME-RL's inference server, which is a vLLM"
    return [Problem(where=config.place("inference.engine"), what=what, fix=f'set engine = "{ENGINE}"')]


def _room(config: Config, options: PrimeRlOptions) -> list[Problem]:
    if config.training.max_tokens < options.seq_len:
        return []
    what = f"max_tokens = {config.training.max_tokens} leaves no room for a prompt in seq_len = {options.seq_len}"
    fix = "raise [backend.options] seq_len, and the trainer's, or lower max_tokens"
    return [Problem(where=config.place("training.max_tokens"), what=what, fix=fix)]


def _credit(config: Config, plugins: Plugins, options: PrimeRlOptions) -> list[Problem]:
    """Token-level credit on the older wire, as far as the names show; the rest is checked when a step is sent."""
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
    return [Problem(where=where, what=what, fix=fix)]
