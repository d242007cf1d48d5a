"""What `tests.kit.tinker_server` serves: a Tinker service of the kind of SkyRL-tx 0.3, with a bigram model inside.

Its policy is a table of logits, `softmax(base[previous] + delta[previous])`; `delta` is trained with AdamW on what
SkyRL-tx computes: the mean of token losses over each row, then over rows. Log-probabilities of samples are raw, and
sampling from older weights puts them back into training, as it does there. `faults` make it misbehave.
"""

import copy
import io
import json
import tarfile
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from safetensors.numpy import save as to_safetensors

MODEL, RANK_LIMIT = "toy/bigram", 32


@dataclass
class Adapter:
    """One training client's weights, moments and gradient."""

    rank: int
    delta: np.ndarray
    first: np.ndarray
    second: np.ndarray
    gradient: np.ndarray
    steps: int = 0
    rows: int = 0


class Gate:
    """Opens for good when so many wait at once; a connection that is lost on the way does no harm."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._lock = threading.Lock()
        self._opened = threading.Event()

    def wait(self) -> None:
        with self._lock:
            self._missing -= 1
            if self._missing <= 0:
                self._opened.set()
        self._opened.wait(60)


@dataclass
class Faults:
    """What goes wrong: `statuses[PATH]` are answered first, `hang` paths never, the rest change results."""

    statuses: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    hang: set[str] = field(default_factory=set)
    latency_s: float = 0.0
    gate: Gate | None = None
    nan_logprobs: bool = False
    short_logprobs: bool = False
    no_sample_logprobs: bool = False
    drop_stop_token: bool = False
    logprobs_after_temperature: bool = False
    reports_sum: bool = False
    base_shift: float = 0.0
    clip_bounds: tuple[float, float] | None = (0.8, 1.2)  # None: those of the request


class Toy:
    """The service's state; one lock, because nothing here is slow."""

    def __init__(self, vocabulary: int = 32, seed: int = 0) -> None:
        self.vocabulary = vocabulary
        self.base = np.random.default_rng(seed).normal(size=(vocabulary, vocabulary))
        self.faults = Faults()
        self.adapters: dict[str, Adapter] = {}
        self.samplers: dict[str, tuple[str, np.ndarray]] = {}  # session -> (model, its weights)
        self.exports: dict[tuple[str, str], np.ndarray] = {}
        self.states: dict[str, Adapter] = {}
        self.results: dict[str, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.lock = threading.Lock()
        self.models = [MODEL]

    def count(self, path: str) -> int:
        """How often a path was called."""
        return sum(1 for called, _ in self.calls if called == path)

    def logprobs(self, delta: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        logits = (self.base + delta) / temperature
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    # ------------------------------------------------------------ requests

    def handle(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a POST, by the last part of its path."""
        with self.lock:
            self.calls.append((path, body))
            if path == "retrieve_future":
                return self.results[body["request_id"]]
            answer = getattr(self, f"on_{path}")(body)
            if path in ("create_session", "session_heartbeat", "telemetry", "weights_info", "create_sampling_session"):
                return answer
            if path == "get_info":
                return answer
            number = str(len(self.results) + 1)
            self.results[number] = answer
            return {"future_id": number, "request_id": number, "status": "pending", **_named(answer)}

    def on_create_session(self, body: dict[str, Any]) -> Any:
        return {"type": "create_session", "session_id": "session_1"}

    def on_session_heartbeat(self, body: dict[str, Any]) -> Any:
        return {"type": "session_heartbeat"}

    def on_create_model(self, body: dict[str, Any]) -> Any:
        rank = body["lora_config"]["rank"]
        if rank > RANK_LIMIT:
            return {"error": f"LoRA rank {rank} must be between 1 and {RANK_LIMIT}"}
        zeros = np.zeros_like(self.base)
        name = f"model_{len(self.adapters)}"
        self.adapters[name] = Adapter(rank, zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy())
        return {"model_id": name, "base_model": MODEL, "lora_config": {"rank": rank, "alpha": 32.0, "seed": 0}}

    def on_get_info(self, body: dict[str, Any]) -> Any:
        data = {"base_model": MODEL, "lora_config": {"rank": self.adapters[body["model_id"]].rank}, "model_name": MODEL}
        return {"model_id": body["model_id"], "status": "created", "model_data": data}

    def on_create_sampling_session(self, body: dict[str, Any]) -> Any:
        session = f"sampling_{len(self.samplers)}"
        self.samplers[session] = "", np.zeros_like(self.base)  # of the base model
        return {"type": "create_sampling_session", "sampling_session_id": session}

    def on_unload_model(self, body: dict[str, Any]) -> Any:
        self.adapters.pop(body["model_id"], None)
        return {"model_id": body["model_id"], "status": "unloaded", "type": "unload_model"}

    def on_weights_info(self, body: dict[str, Any]) -> Any:
        return {"base_model": MODEL, "is_lora": True, "lora_rank": self.states[body["tinker_path"]].rank}

    def on_forward(self, body: dict[str, Any]) -> Any:
        return self._pass(body["model_id"], body["forward_input"], learn=False)

    def on_forward_backward(self, body: dict[str, Any]) -> Any:
        return self._pass(body["model_id"], body["forward_backward_input"], learn=True)

    def on_optim_step(self, body: dict[str, Any]) -> Any:
        adapter, p = self.adapters[body["model_id"]], body["adam_params"]
        if adapter.rows:
            gradient = adapter.gradient / (1 if self.faults.reports_sum else adapter.rows)
            adapter.steps += 1
            adapter.first = p["beta1"] * adapter.first + (1 - p["beta1"]) * gradient
            adapter.second = p["beta2"] * adapter.second + (1 - p["beta2"]) * gradient**2
            first = adapter.first / (1 - p["beta1"] ** adapter.steps)
            second = adapter.second / (1 - p["beta2"] ** adapter.steps)
            adapter.delta = adapter.delta - p["learning_rate"] * first / (np.sqrt(second) + p["eps"])
            adapter.gradient, adapter.rows = np.zeros_like(gradient), 0
        return {"metrics": None}

    def on_save_weights(self, body: dict[str, Any]) -> Any:
        path = f"tinker://{body['model_id']}/weights/{body['path']}"
        kept = copy.deepcopy(self.adapters[body["model_id"]])
        kept.gradient, kept.rows = np.zeros_like(kept.gradient), 0
        self.states[path] = kept
        return {"path": path, "type": "save_weights"}

    def on_load_weights(self, body: dict[str, Any]) -> Any:
        self.adapters[body["model_id"]] = copy.deepcopy(self.states[body["path"]])
        return {"type": "load_weights"}

    def on_save_weights_for_sampler(self, body: dict[str, Any]) -> Any:
        model = body["model_id"]
        delta = self.adapters[model].delta.copy()
        if body.get("path"):
            self.exports[model, body["path"]] = delta
            return {"path": f"tinker://{model}/{body['path']}", "type": "save_weights_for_sampler"}
        session = f"sampling_{len(self.samplers)}"
        self.samplers[session] = model, delta
        return {"path": None, "sampling_session_id": session, "type": "save_weights_for_sampler"}

    def on_asample(self, body: dict[str, Any]) -> Any:
        model, delta = self.samplers[body["sampling_session_id"]]
        if model in self.adapters:
            self.adapters[model].delta = delta.copy()  # the trap: what is sampled from is what is trained
        params = body["sampling_params"]
        prompt = np.asarray(body["prompt"]["chunks"][0]["tokens"])
        told_T = [float(value) for value in self.logprobs(delta)[prompt[:-1], prompt[1:]] + self.faults.base_shift]
        previous = body["prompt"]["chunks"][0]["tokens"][-1]
        sampled = self.logprobs(delta, params.get("temperature", 1.0) or 1.0)
        told = sampled if self.faults.logprobs_after_temperature else self.logprobs(delta)
        random, stop, tokens, values = np.random.default_rng(params.get("seed")), params.get("stop") or [], [], []
        reason = "length"
        for _ in range(params["max_tokens"]):
            token = int(random.choice(self.vocabulary, p=np.exp(sampled[previous])))
            token = token if params.get("temperature", 1.0) else int(sampled[previous].argmax())
            tokens.append(token)
            values.append(float(told[previous, token]))
            previous = token
            if token in stop:
                reason = "stop"
                break
        if self.faults.drop_stop_token and reason == "stop" and len(tokens) > 1:
            tokens, values = tokens[:-1], values[:-1]
        sequence = {"stop_reason": reason, "tokens": tokens, "logprobs": values}
        if self.faults.no_sample_logprobs:
            sequence["logprobs"] = None
        first = [None] if self.faults.reports_sum else []  # SkyRL-tx leaves the first token out
        asked = {"prompt_logprobs": first + told_T} if body.get("prompt_logprobs") else {}
        return {"type": "sample", "sequences": [sequence], **asked}

    # ------------------------------------------------------------ the model

    def _pass(self, model: str, given: dict[str, Any], *, learn: bool) -> Any:
        adapter, outputs, total = self.adapters[model], [], 0.0
        known = ("cross_entropy", "importance_sampling", "ppo", *(["dro"] if self.faults.reports_sum else []))
        if given["loss_fn"] not in known:
            return {"error": f"unknown loss {given['loss_fn']}"}
        table = self.logprobs(adapter.delta)
        for datum in given["data"]:
            inputs = np.asarray(datum["model_input"]["chunks"][0]["tokens"])
            fields = {name: np.asarray(tensor["data"]) for name, tensor in datum["loss_fn_inputs"].items()}
            targets = fields["target_tokens"].astype(int)
            new = table[inputs, targets]
            losses, slopes = self._loss(given, new, fields)
            total += losses.sum()
            if learn:
                weights = fields.get("weights", np.ones(len(targets)))
                scale = 1.0 if self.faults.reports_sum else 1.0 / max(weights.sum(), 1e-9)
                for read, target, slope in zip(inputs, targets, slopes * scale, strict=True):
                    adapter.gradient[read] -= slope * np.exp(table[read])
                    adapter.gradient[read, target] += slope
                adapter.rows += 1
            if self.faults.nan_logprobs:
                new = np.full_like(new, np.nan)
            if self.faults.short_logprobs:
                new = new[:-1]
            outputs.append({"elementwise_loss": _tensor(losses), "logprobs": _tensor(new)})
        metrics = {"loss:sum": float(total)} if self.faults.reports_sum else {}
        if self.faults.reports_sum:
            outputs = [{"logprobs": output["logprobs"]} for output in outputs]
        return {"loss_fn_output_type": "scalar", "loss_fn_outputs": outputs, "metrics": metrics}

    def _loss(self, given: dict[str, Any], new: np.ndarray, fields: dict[str, np.ndarray]) -> Any:
        """Loss of each token and its derivative by the new log-probability."""
        if given["loss_fn"] == "cross_entropy":
            return -fields["weights"] * new, -fields["weights"]
        ratios, advantages = np.exp(new - fields["logprobs"]), fields["advantages"]
        if given["loss_fn"] == "dro":  # over all positions, the prompt's included, as the hosted service has it
            gaps, beta = new - fields["logprobs"], given["loss_fn_config"]["beta"]
            return -advantages * new + 0.5 * beta * gaps**2, -advantages + beta * gaps
        plain = ratios * advantages
        if given["loss_fn"] == "importance_sampling":
            return -plain, -plain
        config = given.get("loss_fn_config") or {}
        asked = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
        bounded = ratios.clip(*(self.faults.clip_bounds or asked)) * advantages
        return -np.minimum(plain, bounded), np.where(bounded < plain, 0.0, -plain)

    def archive(self, model: str, name: str) -> bytes:
        """An adapter as SkyRL-tx packs it: PEFT's files, without target modules."""
        delta = self.exports[model, name]
        config = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 32.0,
            "target_modules": None,
            "base_model_name_or_path": MODEL,
        }
        names = [f"base_model.model.model.layers.0.self_attn.{part}" for part in ("q_proj", "v_proj")]
        factors = {f"{n}.lora_A.weight": delta[:2].astype(np.float32) for n in names}
        factors |= {f"{n}.lora_B.weight": delta[:, :2].astype(np.float32) for n in names}
        files = {
            "adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": to_safetensors(factors),
        }
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
            for file, content in files.items():
                member = tarfile.TarInfo(file)
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
        return buffer.getvalue()


def _tensor(values: np.ndarray) -> dict[str, Any]:
    return {"data": [float(value) for value in values], "dtype": "float32", "shape": [len(values)]}


def _named(answer: Any) -> dict[str, Any]:
    return {"model_id": answer["model_id"]} if isinstance(answer, dict) and "model_id" in answer else {}
