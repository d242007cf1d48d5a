"""Tables that a plugin registers and that other packages read, too; each is at its defaults without its plugin."""

from __future__ import annotations

import json
import re
from functools import partial
from string import Formatter
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import ValidationInfo, field_validator, model_validator

from retrain.kernel.config.keys import Table, key, share
from retrain.kernel.declared import Kind

HERE = "pytorch"  # the engine that is no server
REFERENCE = "reference"


def server_urls(text: str) -> str:
    """Return the value of a key that holds URLs of servers, with commas between them.

    ValueError, without any login, unless each is one.
    """
    for url in filter(None, (part.strip() for part in text.split(","))):
        if not re.fullmatch(r"https?://[^\s/?#]+[^\s?#]*", url) or not _has_address(url):
            raise ValueError(f"{url.rpartition('@')[2]!r} is not a URL such as http://127.0.0.1:8000")
    return text


def _has_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    # `urlsplit` and its `port` raise for a port above 65535 and for half a bracket.
    except ValueError:
        return False


_of_server = partial(key, free_on_resume=True, needs="inference.engine")


class InferenceTable(Table):
    """Which engine samples completions, and how. The keys from `url` to `api_key_env` apply to servers."""

    engine: str = key("pytorch", "pytorch, or a server: max, vllm, sglang, mlx, openai.", names=Kind.INFERENCE_ENGINE)
    options: dict[str, Any] = key({}, "Options of an engine plugin.")
    url: str = _of_server("", "URL of the server, or several with commas; empty = the engine's own on this machine.")
    admin_url: str = _of_server("", "URLs of the servers behind a router at url, with commas: weights go to each.")
    logprobs: Literal["engine", "trainer"] = key(
        "engine", "Behaviour log-probabilities: the engine's own, or recomputed with the training model."
    )
    max_gap: float = _of_server(0.1, "Stop when engine and trainer differ by more on a probe; mean, in nats.", gt=0.0)
    keep_versions: int = _of_server(2, "Policy versions whose adapters a server keeps.", ge=1)
    adapter_dir: str = _of_server("", "Folder for adapters that all servers read; empty = temporary.", is_path=True)
    max_concurrent: int = _of_server(256, "Requests in flight at a time, over all servers.", ge=1)
    timeout_s: float = _of_server(600.0, "Seconds that one request may take.", gt=0.0)
    retry_s: float = _of_server(300.0, "Seconds during which a failed request is retried; 0 = never.", ge=0.0)
    api_key_env: str = _of_server("", "Environment variable that holds the server's key; empty = none.")
    attention_kernel: Literal["default", "flash", "triton", "tk", "cutlass"] = key(
        "default", "Attention kernel of the pytorch engine; default = the best available.", flag="attention_kernel"
    )
    dtype: Literal["auto", "bf16", "fp8", "fp4"] = key(
        "auto", "Weights that the pytorch engine samples with; auto = as in training. The gap is logged."
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = key(
        "auto", "Keys and values cached by the pytorch engine; auto = dtype.", flag="kv_cache_dtype"
    )
    prefix_caching: bool = key(True, "Compute a prompt's keys and values once for its group.", flag="prefix_caching")

    _urls = field_validator("url", "admin_url")(server_urls)


class RewardTable(Table):
    """The reward of completions, unless the data source brings its own verifier."""

    type: str = key("", "Reward: {names} or a plugin.", names=Kind.REWARD)
    weights: dict[str, float] = key({}, "Several rewards together, by name; replaces type.", names=Kind.REWARD)
    params: dict[str, Any] = key({}, "Parameters of a reward plugin; with weights, a table for each reward's name.")
    sees: Literal["answer", "all"] = key("answer", "What rewards see of a completion: its answer, or thoughts as well.")


class ShadowKeys(Table):
    """A second verifier that is scored and never trained."""

    shadow: str = key("", "A second reward that scores all completions and is never trained.", names=Kind.REWARD)
    shadow_params: dict[str, Any] = key(
        {}, "Keys of [reward] for the shadow; the others have defaults.", needs="reward.shadow"
    )


class SetsKeys(Table):
    """Further sets to evaluate on, and the column that groups examples with a common source."""

    sets: dict[str, dict[str, Any]] = key(
        {}, "Further sets: [eval.sets.NAME] with the keys of [data], reward, examples, samples, temperature, greedy..."
    )
    cluster: str = key("", "Column that groups examples with a common source in eval.jsonl; empty = each by itself.")


_of_environment = partial(key, needs="environment.provider")


class EnvironmentTable(Table):
    """Tasks and scoring from an environment instead of `[data]` and `[reward]`."""

    provider: str = key("", "Environment provider: verifiers, mcp, openenv or a plugin.", names=Kind.ENVIRONMENT)
    id: str = key("", "Environment, for example primeintellect/gsm8k.", validate_default=True, reads="package")
    args: dict[str, Any] = _of_environment({}, "Its arguments, a table or JSON text of an object.")
    max_turns: int = _of_environment(-1, "Turns per episode at most; -1 = as the environment says.", ge=-1)
    history: Literal["sampled", "rows"] = _of_environment(
        "sampled", "Earlier turns: the tokens sampled, or as the chat template has them, with a row for each turn."
    )
    auto_install: bool = _of_environment(False, "Install a missing environment from its hub.", free_on_resume=True)
    timeout_s: float = _of_environment(
        60.0, "Seconds that it may take between two turns of all episodes, and to score.", gt=0.0, free_on_resume=True
    )

    @field_validator("args", mode="before", json_schema_input_type=dict[str, Any] | str)
    @classmethod
    def _decoded(cls, args: object) -> object:
        if not isinstance(args, str):
            return args
        try:
            value = json.loads(args) if args.strip() else {}
        # The parser recurses into nested brackets, and a few thousand of them exhaust the stack.
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError("the JSON text must decode to an object")
        return value


class PlanningTable(Table):
    """Which tokens count as planning."""

    detector: str = key("", "{names} or a plugin.", names=Kind.PLANNING_DETECTOR, needs="planning detector")
    params: dict[str, Any] = key({}, "Parameters of a detector plugin.", needs="planning detector")


class TeacherTable(Table):
    """A model whose log-probabilities of the sampled tokens are their rewards; off until a key of it is set."""

    model: str = key("", "Model that teaches; empty = [model] model, or the only model of the server.", reads="model")
    adapter: str = key("", "PEFT adapter on it: its folder, or a run (its newest checkpoint).", reads="adapter")
    engine: str = key(HERE, "pytorch = in this process, or a server: vllm, sglang.", names=Kind.INFERENCE_ENGINE)
    url: str = key("", "URLs of servers, with commas; empty = the engine's own on this machine.", free_on_resume=True)
    api_key_env: str = key("", "Environment variable that holds the server's key; empty = none.", free_on_resume=True)

    _urls = field_validator("url")(server_urls)

    @property
    def is_set(self) -> bool:
        return bool(self.model or self.adapter or self.engine != HERE)


_of_distil = partial(key, needs="distil.teacher")


class DistilTable(Table):
    """The policy as its own teacher, which sees more than the policy did."""

    teacher: Literal["", "base", "live", "ema"] = key(
        "", "Weights that teach: base = the reference, live = the current, ema = their average; empty = off."
    )
    ema_rate: float = _of_distil(0.05, "Share of the current adapter in the average, after each update.", gt=0, le=1)
    template: str = _of_distil(
        "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n",
        "The teacher's last message, of {prompt} and {solution}, {feedback} or {privileged}.",
    )
    solution_template: str = _of_distil(
        "\nCorrect solution:\n\n{solution}\n\n", "The first other completion of the group that succeeded."
    )
    feedback_template: str = _of_distil(
        "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback}\n\n",
        "The reason that the reward gave for its score.",
    )
    privileged: str = _of_distil("privileged", "Column of the data for {privileged}.", min_length=1)
    success: float = _of_distil(1.0, "Reward from which a completion is a solution.", allow_inf_nan=False)
    max_context_tokens: int = _of_distil(10_240, "Tokens of the teacher's context; the last ones stay.", ge=1)
    mode: Literal["sampled_token", "topk", "full"] = _of_distil(
        "sampled_token", "Tokens compared: the sampled one, the top_k of the policy, or all."
    )
    top_k: int = _of_distil(100, "Tokens of mode topk.", ge=1)
    tail: bool = _of_distil(False, "topk: all others count as one more token.")
    alpha: float = _of_distil(1.0, "1 = KL(p, q), 0 = KL(q, p), q the teacher's; between: their mixture.", ge=0, le=1)
    ratio_cap: float = _of_distil(2.0, "Largest weight p now / p when sampled of a token; 0 = no weight.", ge=0)
    skip_tokens: int = _of_distil(0, "First tokens of a completion that are left out.", ge=0)
    weight: float = _of_distil(1.0, "Weight of the distillation; the policy loss has the rest.", gt=0, le=1)

    @field_validator("template", "solution_template", "feedback_template")
    @classmethod
    def _has_fields(cls, text: str, info: ValidationInfo) -> str:
        one = str(info.field_name).removesuffix("_template")
        fields = ("prompt", "solution", "feedback", "privileged") if one == "template" else (one,)
        if found := {name for _, name, _, _ in Formatter().parse(text) if name is not None} - {*fields}:
            raise ValueError(f"{min(found)!r} is no field: {', '.join(f'{{{name}}}' for name in fields)}")
        return text


_of_sft = partial(key, needs="sft.steps")


class SftTable(Table):
    """Training on given answers before the first step."""

    steps: int = key(0, "Supervised steps before the first step; 0 = none.", ge=0)
    source: str = _of_sft("", "Data source of prompts and answers; empty = the run's own.", names=Kind.DATA_SOURCE)
    path: str = _of_sft("", "As [data] path, for this source.", reads="data")
    options: dict[str, Any] = _of_sft({}, "As [data.options], for this source.")
    answer: str = _of_sft(REFERENCE, "Trained text: `reference`, or the column of a worked solution.", min_length=1)
    batch_size: int = _of_sft(32, "Examples per supervised step.", ge=1)
    lr: float = _of_sft(0.0, "Learning rate of the supervised steps; 0 = [training] lr.", ge=0.0)


class KlTable(Table):
    """KL divergence of the policy from its reference, the model that training began with."""

    coef: float = key(0.0, "Weight of the KL divergence; 0 = off.", ge=0.0)
    where: Literal["loss", "reward"] = key("loss", "A term of the loss, or taken off the rewards.", needs="kl.coef")
    estimator: Literal["", "k1", "k2", "k3"] = key(
        "",
        "Estimate per token, with d = log p_ref - log p: k1 = -d, k2 = d²/2, k3 = e^d - 1 - d; empty = k3 in the "
        "loss, k1 in the reward.",
        needs="kl.coef",
    )
    target: float = key(0.0, "Mean KL per token that coef is steered to; 0 = coef is fixed.", ge=0.0)
    horizon: int = key(0, "Completions in which a steered coefficient changes by up to a fifth.", ge=0)
    log: bool = key(True, "Record kl_mean with coef = 0 too, where the backend has it cheaply.", free_on_resume=True)


class EntropyTable(Table):
    """Terms against a collapse of the policy's entropy."""

    coef: float = key(0.0, "Weight of the entropy as a bonus in the loss; 0 = off.", ge=0.0)
    kl_cov: float = share(
        0.0,
        "Share of the action tokens, with the highest covariance of log-probability and advantage, that are held near "
        "their old probability; 0 = off.",
    )
    kl_cov_coef: float = key(1.0, "Weight of |log p - log p_old| at these tokens.", gt=0.0, needs="entropy.kl_cov")
    clip_cov: float = share(
        0.0, "Share of the action tokens, drawn among tokens of high covariance, that get no gradient; 0 = off."
    )
    clip_cov_low: float = key(1.0, "Lower bound of clip_cov's draw.", allow_inf_nan=False, needs="entropy.clip_cov")
    clip_cov_high: float = key(5.0, "Upper bound of clip_cov's draw.", allow_inf_nan=False, needs="entropy.clip_cov")


_of_pacer = partial(key, needs="backpressure.enabled")


class BackpressureTable(Table):
    """Adaptive batch sizing (Universal Scalability Law and roofline)."""

    enabled: bool = key(False, "Let measured throughput set the batch size.")
    pacer: str = _of_pacer("usl", "Pacer that sets the batch size: usl or a plugin.", names=Kind.PACER)
    warmup_steps: int = _of_pacer(10, "Steps that sweep 1, 2, 4, ... prompts before the first decision.", ge=0)
    ema_decay: float = _of_pacer(0.9, "Decay of the throughput average (bp_throughput).", ge=0.0, le=1.0)
    throttle_margin: float = _of_pacer(0.85, "Target: this fraction of the p of highest throughput.", gt=0.0, le=1.0)
    increase_margin: float = _of_pacer(0.5, "Increase when below this fraction of the target.", gt=0.0, le=1.0)
    min_batch_size: int = _of_pacer(1, "Smallest batch size.", ge=1)
    max_batch_size: int = _of_pacer(64, "Largest batch size.", ge=1)
    peak_gflops: float = _of_pacer(0.0, "Peak GFLOP/s of the device; 0 = unknown.", ge=0.0)
    peak_bw_gb_s: float = _of_pacer(0.0, "Peak memory bandwidth, GB/s; 0 = unknown.", ge=0.0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_batch_size < self.min_batch_size:
            raise ValueError("max_batch_size is below min_batch_size")
        return self
