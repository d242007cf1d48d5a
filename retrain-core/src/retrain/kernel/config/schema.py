"""The tables that belong to the kernel, one model each; whichever plugin uses another table registers it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from retrain.kernel.config.keys import Table, free, key, share
from retrain.kernel.declared import CORRECT_ABOVE, Kind

SeedSource = Literal["data", "initialisation", "sampling", "evaluation"]
# The range that a drawn `[training] seed` comes from, so that every recorded seed can be set here.
SeedNumber = Annotated[int, Field(ge=0, lt=2**31)]
HELD_OUT = "eval.examples or eval.sets or data.tasks"
SERVICE = "inference.engine or backend.backend"
INSTRUCTION = r"Put your final answer in \boxed{}."


class BackendTable(Table):
    """Who owns the policy, and where."""

    backend: str = key("", "Training backend: {names} or a plugin.", names=Kind.BACKEND)
    devices: str = key("gpu:0", "Comma-separated devices: cpu, gpu:0, ...; left out, the CPU if there is no GPU.")
    adapter_path: str = key("", "Folder of the checkpoints; empty = `adapter` in the run folder.", is_path=True)
    throttle_dir: str = free(
        "", "Lock folder shared by runs that call one service; empty = none.", needs=SERVICE, is_path=True
    )
    max_concurrent: int = free(4, "Concurrent calls of all runs with it.", ge=1, needs="backend.throttle_dir")
    options: dict[str, Any] = key({}, "Options of the backend; see the backend's own page.")


class ModelTable(Table):
    """Which model is trained."""

    model: str = key("Qwen/Qwen3-4B-Instruct-2507", "Hub id, folder, or builtin:tiny.", min_length=1, reads="model")
    base_url: str = free("", "URL of a training service; empty = the backend's.", needs="backend.backend")
    lora_rank: int = key(32, "LoRA rank; alpha is twice it unless [lora] alpha says otherwise; 0 = all weights.", ge=0)
    trust_remote_code: bool = key(False, "Run Python code that comes with the model. Only for sources you trust.")


class AlgorithmTable(Table):
    """Credit, from rewards to numbers per token, and the loss."""

    recipe: str = key("", "Defaults under one name: {names} or a plugin. Keys that are set win.", names=Kind.RECIPE)
    algorithm_mode: str = key("", "Whole pipeline by name; overrides advantage and transform.", names=Kind.ALGORITHM)
    advantage_mode: str = key("", "Credit per completion: {names} or a plugin.", names=Kind.ADVANTAGE)
    transform_mode: str = key("", "Credit per token: {names} or a plugin.", names=Kind.TRANSFORM)
    uncertainty_kind: str = key("", "{names} or a plugin.", names=Kind.UNCERTAINTY)
    surprisal_mask_rho: float = share(
        0.0,
        "Keep credit on this fraction of the most uncertain action tokens of the step; 0 = off.",
        aliases=("entropy_mask_rho",),
        needs="top-rho mask",
    )
    loss: str = key("importance_sampling", "Policy loss: {names} or a plugin.", names=Kind.LOSS, min_length=1)
    clip_eps: float = key(0.0, "The ratio counts from 1 - clip_eps; 0 = the loss's own (ppo: 0.2).", ge=0.0, lt=1.0)
    clip_eps_high: float = key(0.0, "It counts up to 1 + this; cispo: largest weight; 0 = the loss's own.", ge=0.0)
    tis_cap: float = key(0.0, "Truncate the trainer/sampler importance weight at this value; 0 = off.", ge=0.0)
    params: dict[str, Any] = key(
        {}, "Parameters of the algorithm plugin.", flag="algorithm_params", needs="algorithm.algorithm_mode"
    )
    advantage_params: dict[str, Any] = key({}, "Parameters of the advantage.", needs="advantage")
    transform_params: dict[str, Any] = key({}, "Its parameters; may hold uncertainty_kind.", needs="transform")
    batch_norm: bool = key(False, "(A - mean) / (std + 1e-8) over the step's judged completions.", needs="advantage")
    advantage_clip: float = key(
        0.0, "Then advantages between -advantage_clip and advantage_clip; 0 = off.", ge=0.0, needs="advantage"
    )
    dual_clip: float = key(0.0, "ppo: a negative advantage counts at most this many times (> 1); 0 = off.")
    aggregation: Literal["", "token_mean", "sequence_mean", "constant"] = key(
        "", "Average of the loss; empty = the loss's own: token_mean, for gspo sequence_mean."
    )
    loss_params: dict[str, Any] = key({}, "Parameters of the loss.")
    level: Literal["sequence", "turn"] = key(
        "sequence", "A loss by sequence takes its ratio over the whole completion, or over each turn."
    )
    is_level: Literal["token", "sequence", "geometric"] = key(
        "token", "Weights that is_bounds apply to: by token, their product over a sequence, or its T-th root."
    )
    is_mode: Literal["truncate", "mask"] = key(
        "truncate", "A trainer/sampler importance weight outside is_bounds: moved to the bound, or 0."
    )
    is_bounds: list[float] = key([], "[low, high] of the trainer/sampler importance weight; empty = off.")
    off_policy_mask: float = key(0.0, "Leave out A < 0 where mean log p_sampler - log p is above; 0 = off.", ge=0.0)
    normalise_by: Literal["", "task"] = key(
        "", "task: batch_norm over the completions of each of [[data.tasks]]; empty = as batch_norm.", needs="advantage"
    )

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, value: float) -> float:
        # At 1 or below it would cut tokens whose policy has not changed, since their ratio is 1.
        if value != 0.0 and value <= 1.0:
            raise ValueError("must be above 1, usually 3; 0 = off")
        return value

    @field_validator("is_bounds")
    @classmethod
    def _a_range(cls, bounds: list[float]) -> list[float]:
        if bounds and not (len(bounds) == 2 and 0.0 <= bounds[0] < bounds[1]):
            raise ValueError("must be [low, high] with 0 <= low < high, for example [0.5, 2.0]")
        return bounds


class PluginsTable(Table):
    """Search paths of dotted names."""

    search_paths: list[str] = key(
        ["plugins"], "Module prefixes tried before the plain path.", flag="plugins_search_paths"
    )
    strict: bool = key(
        True, "Fail at once on a plugin's error.", flag="plugins_strict", pending="a lenient mode is not built"
    )

    @field_validator("search_paths")
    @classmethod
    def _not_empty(cls, paths: list[str]) -> list[str]:
        if any(not path.strip() for path in paths):
            raise ValueError("a search path must not be empty")
        return paths


class TrainingTable(Table):
    """The size of a step and the number of steps."""

    seed: int = key(-1, "Root seed; -1 draws one, records it and uses it.", ge=-1, lt=2**31)
    seeds: dict[SeedSource, SeedNumber] = key({}, "Set apart from seed: data, initialisation, sampling, evaluation.")
    max_steps: int = free(500, "Training steps.", ge=1)
    batch_size: int = key(8, "Prompts per step.", ge=1)
    group_size: int = key(16, "Completions per prompt.", ge=1)
    max_tokens: int = key(10240, "New tokens per completion at most.", ge=1)
    max_thinking_tokens: int = key(0, "Tokens after which an open thought is closed, untrained; 0 = no limit.", ge=0)
    temperature: float = key(0.7, "Sampling temperature; the trainer uses the same.", gt=0.0)
    top_p: float = key(1.0, "Nucleus sampling.", gt=0.0, le=1.0, pending="only the full distribution can be trained on")
    lr: float = key(
        4e-5,
        'AdamW learning rate; the highest one with a schedule. "auto": 4e-5, or 4e-6 if lora_rank = 0.',
        gt=0.0,
        auto=(4e-5, 4e-6),
    )
    weight_decay: float = key(0.0, "AdamW weight decay.", ge=0.0)
    max_examples: int = key(0, "Use at most this many examples, drawn after shuffling; 0 = all.", ge=0)
    save_every: int = free(20, "Steps between checkpoints; 0 = only the last.", ge=0)
    keep_last: int = free(0, "Newest checkpoints to keep; 0 = all without keep_best; 2 if lora_rank = 0.", ge=0)
    keep_best: int = free(0, "Keep this many checkpoints with the highest keep_best_metric.", ge=0)
    keep_best_metric: str = free("eval_correct_rate", "Field of metrics.jsonl that ranks them.")
    max_bad_steps: int = free(3, "Stop after this many steps in a row with a non-finite number; 0 = never.", ge=0)
    grace_s: float = free(30.0, "Seconds that a stop by a signal may take before the process leaves.", gt=0.0)
    overlong: Literal["keep", "mask", "drop"] = key(
        "keep", "Truncated completions: keep, mask (out of the loss) or drop (out of the baseline, too)."
    )
    soft_overlong: int = key(0, "Zone below max_tokens in which the reward falls by up to 1; 0 = off.", ge=0)
    refill: int = key(0, "Further rounds of prompts, at most, until batch_size groups can teach; 0 = off.", ge=0)
    minibatches: int = key(1, "Optimizer steps that share out the step's groups.", ge=1)
    epochs: int = key(1, "Passes over the step's groups, each of `minibatches` optimizer steps.", ge=1)
    max_staleness: int = key(-1, "Steps sampled ahead; -1 = 1 on split devices, otherwise 0 (in turn).", ge=-1, le=64)
    control: Literal["", "random_reward", "format_only", "no_update"] = key(
        "", "Make the run a control: training is rewarded by coin flips, or only by form, or nothing is updated."
    )

    @field_validator("max_thinking_tokens")
    @classmethod
    def _leaves_an_answer(cls, value: int, info: ValidationInfo) -> int:
        if value >= info.data.get("max_tokens", value + 1):
            raise ValueError("must be below max_tokens, so that an answer has room after the thought")
        return value


class OptimizerTable(Table):
    """AdamW and the gradient norm."""

    beta1: float = key(0.9, "AdamW beta1.", ge=0.0, lt=1.0)
    beta2: float = key(0.95, "AdamW beta2.", ge=0.0, lt=1.0)
    eps: float = key(1e-8, "AdamW epsilon.", gt=0.0)
    grad_clip_norm: float = key(0.0, "Clip the gradient to this L2 norm; 0 = off.", ge=0.0)
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "Decay of lr until [training] max_steps.")
    warmup_steps: int = key(0, "Steps in which the learning rate rises to [training] lr.", ge=0)
    min_lr_ratio: float = key(0.0, "The rate never falls below this share of [training] lr.", ge=0.0, le=1.0)


class LoraTable(Table):
    """The adapter."""

    alpha: int = key(0, 'LoRA alpha; 0 = twice the rank. "auto": 32 at every rank.', ge=0, auto=(32, 0))
    dropout: float = key(
        0.0, "LoRA dropout.", ge=0.0, lt=1.0, pending="dropout would make sampler and trainer disagree"
    )


_of_tasks = partial(key, needs="data.tasks")


class DataTable(Table):
    """The tasks, and the form of their prompts. No source ignores a source-specific key."""

    source: str = key("", "{names} or a plugin.", names=Kind.DATA_SOURCE)
    path: str = key("", "File or folder (files), id (hub), or a local copy of a named data set.", reads="data")
    prompt_key: str = key("prompt", "Column of the prompt, or a field in one: a.b.", min_length=1, flag="prompt_key")
    answer_key: str = key("answer", "Column or field of the reference answer.", min_length=1, flag="answer_key")
    messages_key: str = key("", "Column of a chat that may end with the answer; no prompt_key.", flag="messages_key")
    instruction: str = key(INSTRUCTION, "Sentence put after every plain prompt; empty = none.")
    system_prompt: str = key("", "System message put before every plain prompt; empty = none.")
    template_args: dict[str, Any] = key({}, "Arguments of the chat template, for example {reasoning_effort = 'low'}.")
    thinking: Literal["template", "on", "off"] = key("template", "Thoughts: on, off, or as the template has them.")
    options: dict[str, Any] = key({}, "Options of the source (`--data-opt k=v`); see the source's own page.")
    sampler: str = key("uniform", "Sampler of each step's prompts: {names} or a plugin.", names=Kind.SAMPLER)
    sampler_params: dict[str, Any] = key({}, "Parameters of the sampler.")
    tasks: list[dict[str, Any]] = key(
        [], "Several tasks: [[data.tasks]] with name, weight, reward, environment, held_out and keys of [data]."
    )
    schedule: Literal["weight", "proportional", "temperature", "posterior"] = _of_tasks(
        "weight", "Share of a task: its weight, its size, size^(1 / schedule_temperature), or its chance to teach."
    )
    schedule_temperature: float = _of_tasks(2.0, "1 = proportional to sizes; the higher, the more equal.", ge=1.0)
    dead_task: Literal["keep", "pause", "end"] = _of_tasks(
        "keep", "A task that taught nothing in dead_steps steps: keep it, pause it for as many, or end it."
    )
    dead_steps: int = _of_tasks(10, "Steps in a row, with groups of the task, of which none taught.", ge=1)

    @property
    def task_names(self) -> tuple[str, ...]:
        return tuple(str(each.get("name", "")) for each in self.tasks)


class RewardLimits(Table):
    """`[scoring.limits.NAME]`: limits of one reward; an absent key takes its value from `[scoring]`."""

    timeout_s: float | None = key(None, "Seconds that scoring one completion may take.", gt=0.0)
    retries: int | None = key(None, "Further tries of a score that failed.", ge=0)
    max_failed_frac: float | None = key(None, "Stop when more than this share failed.", ge=0.0, le=1.0)


class ScoringTable(Table):
    """Scoring of completions, in processes that can be killed, while others are still being sampled."""

    workers: int = free(0, "Scoring processes; 0 = one less than the cores, from 1 to 8.", ge=0)
    timeout_s: float = key(10.0, "Seconds that scoring one completion may take.", gt=0.0)
    retries: int = key(1, "Further tries of a score that failed.", ge=0)
    max_failed_frac: float = key(0.1, "Stop when more than this share of a step's scores failed.", ge=0.0, le=1.0)
    memory_gb: float = free(8.0, "Memory of a scoring process; 0 = unlimited.", ge=0.0)
    cache: bool = free(True, "Score equal completions of an example once.")
    audit: Literal["stop", "warn", "off"] = free("stop", "When the reward fails its audit.")
    audit_examples: int = free(8, "Examples, at most, that the reward is tried on before training.", ge=1)
    correct_above: float = key(CORRECT_ABOVE, "A score above this counts as correct.", allow_inf_nan=False)
    limits: dict[str, RewardLimits] = key({}, "Other limits for single rewards: [scoring.limits.judge] timeout_s = 60.")


class EvalTable(Table):
    """Held-out evaluation on examples that are never trained on."""

    every: int = key(0, "Steps between evaluations; 0 = before the first and after the last.", ge=0, needs=HELD_OUT)
    examples: int = key(0, "Held-out examples; 0 = no evaluation.", ge=0)
    skip: int = key(0, "Examples kept out of both sides before the held-out ones are taken.", ge=0, needs=HELD_OUT)
    samples: int = key(4, "Completions per held-out example, for the correct rate and pass@k.", ge=1, needs=HELD_OUT)
    seed: int = key(0, "Seed of the split and of the evaluation's sampling, apart from the run's.", ge=0)


class LoggingTable(Table):
    """The run folder and the recorders."""

    log_dir: str = free("logs/train", "Run folder.", min_length=1, is_path=True)
    recorders: list[str] = free([], "Recorders in addition to the JSONL files, by name.", names=Kind.RECORDER)


class ResumeTable(Table):
    """Continue an earlier run."""

    from_: str = free("", "Run folder to continue (`--resume DIR`).", alias="from", is_path=True)
    anyway: bool = free(
        False, "Continue although configuration, code or data make it a different run.", needs="resume.from_"
    )
