"""Builds the calls to the servers of one engine: completions of one model, and administration."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.engines.client import Call, Client
from retrain.engines.dialect import Completion, CompletionRequest, Dialect, HttpRequest, ServedModel, checked
from retrain.engines.policy import Policy
from retrain.engines.pool import Server
from retrain.kernel.types import Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Caller:
    """Client, dialect and model. `served` is the model as each server names it, by the server's URL.

    `context_limit` is the smallest known one.
    """

    client: Client
    dialect: Dialect
    served: dict[str, ServedModel]
    stop_ids: frozenset[int]
    vocabulary: int
    context_limit: int | None

    @property
    def servers(self) -> tuple[Server, ...]:
        """All servers."""
        return self.client.pool.servers

    @property
    def present(self) -> tuple[Server, ...]:
        """The servers that have answered so far."""
        return tuple(server for server in self.servers if server.url in self.served)

    def completion(
        self,
        prompt_T: Tokens,
        *,
        seed: int,
        max_tokens: int,
        temperature: float,
        key: str = "",
        adapter: str = "",
        server: Server | None = None,
        top: int = 0,
        cache_salt: str = "",
        label: str = "a completion",
    ) -> Call[Completion]:
        """The call for one completion of at most `max_tokens`, fewer where the context has no room for them.

        Either from the policy version `key`, by any server that holds it, or from an `adapter` of one `server`, empty
        for the base model.
        """
        room = max_tokens if self.context_limit is None else min(max_tokens, self.context_limit - len(prompt_T))
        prompt = prompt_T.tolist()

        def addressed(server: Server) -> Call[Completion]:
            request = CompletionRequest(
                prompt_T=prompt,
                seed=seed,
                max_tokens=room,
                temperature=temperature,
                model=self.served[server.url].name,
                adapter=server.names[key] if key else adapter,
                stop_ids=self.stop_ids,
                vocabulary=self.vocabulary,
                top=top,
                cache_salt=cache_salt,
            )
            path, body = self.dialect.completion(request)

            def read(answer: Any) -> Completion:
                return checked(self.dialect.parse_completion(answer, request), request)

            return Call(path=path, body=body, read=read, server=server, label=label)

        if server is not None:
            return addressed(server)
        return Call(path="", read=_unread, key=key, addressed=addressed, label=label)

    def admin_call(self, request: HttpRequest, server: Server, label: str) -> Call[None]:
        """An administrative request to one server, or to all behind it; its answer is ignored."""
        path, body = request
        call: Call[None] = Call(path=path, body=body, read=lambda answer: None, server=server, label=label)
        return replace(call, ignores_answer=True, urls=self.client.admin_urls)


def _unread(answer: Any) -> Completion:
    raise AssertionError("the call was sent without a server")


def vocabulary_of(policy: Policy, tokenizer: Any) -> int:
    """Number of token ids of the model with the padding rows of its embedding; the tokenizer's where unknown."""
    path = Path(policy.model_path)
    known = len(tokenizer)
    with suppress(OSError, ValueError, AttributeError, TypeError):
        if not path.is_dir():
            from transformers.utils import cached_file  # heavy: only for a model from the hub

            path = Path(cached_file(policy.model_path, "config.json", local_files_only=True)).parent
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        known = max(known, int((config.get("text_config") or config).get("vocab_size") or 0))
    return known
