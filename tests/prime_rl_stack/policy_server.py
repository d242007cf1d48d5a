"""A small inference server as a process: a real model, adapters loaded at run time, the routes of PRIME-RL's server.

`python policy_server.py MODEL PORT_FILE`. Completions take and return token ids; log-probabilities are those of
softmax(logits / temperature), the distribution that is sampled. Every weight route is noted in `GET /calls`.
`POST /switch {"refuse": [404, 503]}` makes the next loads fail with these codes.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PEFT_PREFIX = "base_model.model."


class Policy:
    """The model and its adapters; one request at a time."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self.path = path
        self.base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.peft: PeftModel | None = None
        self.adapters: set[str] = set()
        self.prefixes: dict[Any, Any] = {}  # as vLLM's: new weights under an old name do not clear it
        self.is_paused = False
        self.lock = threading.Lock()

    def load(self, name: str, folder: str) -> None:
        """As vLLM, with or without PEFT's prefix; KeyError on an adapter that lacks a tensor of its modules."""
        key, config = name.replace(".", "_"), LoraConfig.from_pretrained(folder)
        tensors = load_file(Path(folder) / "adapter_model.safetensors")
        tensors = {f"{PEFT_PREFIX}{name.removeprefix(PEFT_PREFIX)}": tensor for name, tensor in tensors.items()}
        if self.peft is None:
            self.peft = get_peft_model(self.base, config, adapter_name=key)
        else:
            self.peft.add_adapter(key, config)
        wanted = set(get_peft_model_state_dict(self.peft, adapter_name=key))
        if wanted != set(tensors):
            raise KeyError(f"tensors of the adapter that are missing or unknown: {sorted(wanted ^ set(tensors))[:4]}")
        set_peft_model_state_dict(self.peft, tensors, adapter_name=key)
        self.peft.eval()
        self.adapters.add(name)

    def unload(self, name: str) -> None:
        self.adapters.discard(name)  # its tensors stay: this server does not live long

    def update(self, folder: str) -> None:
        tensors = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
        self.base.load_state_dict(tensors, strict=False)

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self._model(body["model"])
        generator = torch.Generator().manual_seed(int(body.get("seed") or 0) % 2**63)
        tokens, logprobs, tops = [], [], []
        cache, ids = self._read_prompt(model, body)
        stop_ids = set(body.get("stop_token_ids") or ())
        while len(tokens) < body["max_tokens"]:
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            temperature = body["temperature"] or 1.0
            logprobs_V = (out.logits[0, -1].double() / temperature).log_softmax(-1)
            drawn = (
                logprobs_V.argmax()
                if not body["temperature"]
                else torch.multinomial(logprobs_V.exp(), 1, generator=generator)[0]
            )
            token = int(drawn)
            tokens.append(token)
            logprobs.append(float(logprobs_V[token]))
            best = logprobs_V.topk(max(int(body.get("logprobs") or 1), 1))
            tops.append({f"token_id:{int(i)}": float(v) for v, i in zip(best.values, best.indices, strict=True)})
            if token in stop_ids:
                break
            ids = torch.tensor([[token]])
        return {
            "model": body["model"],
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "token_ids": tokens,
                    "prompt_token_ids": body["prompt"],
                    "logprobs": {"token_logprobs": logprobs, "top_logprobs": tops},
                    "finish_reason": "stop" if tokens[-1] in stop_ids else "length",
                }
            ],
        }

    def _read_prompt(self, model: Any, body: dict[str, Any]) -> tuple[Any, Any]:
        """Keys and values of the prompt but its last token. They are kept by the name of the model and the salt."""
        ids = torch.tensor([body["prompt"]])
        if ids.shape[1] == 1:
            return None, ids
        key = (body["model"], body.get("cache_salt", ""), tuple(body["prompt"]))
        if key not in self.prefixes:
            self.prefixes[key] = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        return copy.deepcopy(self.prefixes[key]), ids[:, -1:]

    def _model(self, name: str) -> Any:
        if self.peft is None:
            return self.base
        if name in self.adapters:
            self.peft.base_model.enable_adapter_layers()
            self.peft.set_adapter(name.replace(".", "_"))
        else:
            self.peft.base_model.disable_adapter_layers()
        return self.peft


class Handler(BaseHTTPRequestHandler):
    """The routes; `policy`, `calls` and `refusals` are the server's."""

    protocol_version = "HTTP/1.1"
    policy: Policy
    calls: list[list[Any]]
    refusals: list[int]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            limit = self.policy.base.config.max_position_embeddings
            self._answer(200, {"data": [{"id": self.policy.path, "root": self.policy.path, "max_model_len": limit}]})
        elif self.path == "/calls":
            self._answer(200, self.calls)
        else:
            self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        with self.policy.lock:
            code, answer = self._serve(urlsplit(self.path).path, body)
        self._answer(code, answer)

    def _serve(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        policy = self.policy
        if path == "/switch":
            self.refusals.extend(body["refuse"])
            return 200, {}
        if path == "/v1/completions":
            if body["model"] not in policy.adapters | {policy.path}:
                return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
            return 200, policy.complete(body)
        self.calls.append([self.path, body])
        if path in ("/load_lora_adapter", "/v1/load_lora_adapter", "/update_weights") and self.refusals:
            return self.refusals.pop(0), {"error": {"message": "as the test asked for"}}
        if path in ("/load_lora_adapter", "/v1/load_lora_adapter"):
            if body["lora_name"] in policy.adapters:
                return 400, {"error": {"message": f"{body['lora_name']} has already been loaded"}}
            try:
                policy.load(body["lora_name"], body["lora_path"])
            except KeyError as error:
                return 400, {"error": {"message": str(error)}}
        elif path in ("/unload_lora_adapter", "/v1/unload_lora_adapter"):
            policy.unload(body["lora_name"])
        elif path == "/update_weights":
            if not policy.is_paused:
                return 409, {"error": {"message": "pause first"}}
            policy.update(body["weight_dir"])
        elif path in ("/pause", "/resume"):
            policy.is_paused = path == "/pause"
        else:
            return 404, {"error": {"message": "no such route"}}
        return 200, {"status": "ok"}

    def _answer(self, code: int, content: Any) -> None:
        payload = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


def main() -> None:
    Handler.policy, Handler.calls, Handler.refusals = Policy(sys.argv[1]), [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    draft = Path(sys.argv[2] + ".tmp")
    draft.write_text(str(server.server_port), encoding="utf-8")
    draft.rename(sys.argv[2])
    server.serve_forever()


if __name__ == "__main__":
    main()
