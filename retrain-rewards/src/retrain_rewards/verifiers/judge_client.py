"""Calls the judge within its rate limits, and reads the verdict, or the reason for a missing one."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from retrain.api import Score
from retrain_rewards.tables import RewardTable

# A first estimate of a request's tokens, corrected by the server's count.
BYTES_PER_TOKEN = 4
# Exceptions of the library when a body is not JSON, or does not have the form of a completion.
NOT_A_COMPLETION = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
OPENAI_URL = "https://api.openai.com/v1"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
NO_KEY = "none-needed"  # sent to a server on this machine when there is no key


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """The judge's keys of `[reward]`; its API key stays in the environment variable that they name."""

    table: RewardTable
    marker_key: int  # of the hash that marks where an answer begins and ends
    time_limit_s: float

    @property
    def base_url(self) -> str:
        return self.table.judge_base_url.rstrip("/") or OPENAI_URL

    @property
    def concurrency(self) -> int:
        """Return at most as many calls as the rate allows in half of the time limit, since waiting counts too."""
        rate = self.table.judge_requests_per_minute * self.time_limit_s / 120.0
        return max(1, min(self.table.judge_concurrency, int(rate))) if rate else self.table.judge_concurrency

    @property
    def is_openai(self) -> bool:
        return self.base_url == OPENAI_URL

    @property
    def is_local(self) -> bool:
        return (urlsplit(self.base_url).hostname or "") in LOOPBACK

    def key(self) -> str:
        return os.environ.get(self.table.judge_api_key_env, "").strip() or (NO_KEY if self.is_local else "")


class JudgeError(Exception):
    """The judge did not answer; the text says why and how to repair it, without the key."""


class JudgeClient:
    """The rate-limited `openai` client of one event loop; `on_request` is called for each request, retries too."""

    def __init__(self, settings: JudgeSettings, on_request: Callable[[], None]) -> None:
        import openai

        table = settings.table
        self._settings, self._table = settings, table
        self._key = settings.key()
        self._limiter = Limiter(table.judge_requests_per_minute, table.judge_tokens_per_minute)
        self._on_request = on_request
        http = openai.DefaultAsyncHttpxClient(
            event_hooks={"request": [self._before_request]},
            timeout=settings.time_limit_s,
            # No proxy between two programs of one machine.
            trust_env=not settings.is_local,
        )
        self._openai = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=settings.base_url,
            max_retries=table.judge_retries,
            timeout=settings.time_limit_s,
            http_client=http,
        )

    async def ask(self, prompt: str) -> tuple[Score, int, int]:
        """Return the verdict, and the tokens in and out that the server counted, 0 if it did not."""
        import openai

        table = self._table
        # every server but OpenAI's knows the old name
        limit = "max_completion_tokens" if self._settings.is_openai else "max_tokens"
        options: dict[str, Any] = {limit: table.judge_max_tokens}
        if table.judge_temperature >= 0.0:
            options["temperature"] = table.judge_temperature
        messages: Any = [{"role": "user", "content": prompt}]
        try:
            raw = await self._openai.chat.completions.create(model=table.judge_model, messages=messages, **options)
        except openai.APIError as error:
            raise JudgeError(self._without_key(self._reason(error))) from None
        except NOT_A_COMPLETION as error:
            what = f"the judge at {self._host} gave no chat completion: {type(error).__name__}: {head(str(error))}"
            raise JudgeError(self._without_key(what)) from None
        score, tokens_in, tokens_out = self._read(raw)
        if counted := tokens_in + tokens_out:
            self._limiter.settle(counted - self._expected(len(prompt.encode())))
        return score, tokens_in, tokens_out

    async def close(self) -> None:
        await self._openai.close()

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "(hidden)") if self._key else text

    @property
    def _host(self) -> str:
        return urlsplit(self._settings.base_url).netloc

    def _expected(self, num_bytes: int) -> int:
        return num_bytes // BYTES_PER_TOKEN + self._table.judge_max_tokens

    async def _before_request(self, request: Any) -> None:
        await self._limiter.wait(self._expected(len(request.content)))
        self._on_request()

    def _read(self, raw: Any) -> tuple[Score, int, int]:
        choices: Any = getattr(raw, "choices", None)
        message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
        if message is None:
            what = f"the judge at {self._host} gave no chat completion"
            shown = head(raw if isinstance(raw, str) else type(raw).__name__)
            raise JudgeError(self._without_key(f"{what}: {shown!r}; judge_base_url is its API, usually up to /v1"))
        content = getattr(message, "content", None)
        usage = getattr(raw, "usage", None)
        text = self._without_key(content) if isinstance(content, str) else ""
        score = read_verdict(text, was_cut=getattr(choices[0], "finish_reason", None) == "length")
        counts = (getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens"))
        tokens_in, tokens_out = (count if type(count) is int and count > 0 else 0 for count in counts)
        return score, tokens_in, tokens_out

    def _reason(self, error: Any) -> str:
        table, status = self._table, getattr(error, "status_code", None)
        who = f"the judge at {self._host}"
        # Without the server's words: some repeat the key.
        if status in (401, 403):
            return f"{who} refuses the key in {table.judge_api_key_env} (HTTP {status}): check the key and its rights"
        if status == 404:
            other = "or judge_base_url is not its API, usually up to /v1"
            return f"{who} has no model {table.judge_model!r} (HTTP 404), {other}"
        if status == 429:
            fix = "lower judge_requests_per_minute, judge_tokens_per_minute or judge_concurrency"
            return f"{who} gets too many requests, or its quota is used up (HTTP 429): {fix}"
        if status is not None:
            return f"{who} answered HTTP {status}: {head(str(error))}"
        cause = error.__cause__ or error
        return f"{who} cannot be reached: {type(cause).__name__}: {head(str(cause))}"


MINUTE_S = 60.0


class Limiter:
    """Lets callers through in order, spaced evenly; 0 = unlimited. One that is cancelled delays no other."""

    def __init__(
        self,
        requests_per_minute: int,
        tokens_per_minute: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._request_s = MINUTE_S / requests_per_minute if requests_per_minute else 0.0
        self._token_s = MINUTE_S / tokens_per_minute if tokens_per_minute else 0.0
        self._now = clock
        self._sleep = sleep
        # Serves its waiters in order.
        self._turn = asyncio.Lock()
        self._free_at = 0.0  # when the next request may go
        self._paid_at = 0.0  # when the rate has made up for all tokens so far

    async def wait(self, tokens: int) -> None:
        """Return when the next call, of about `tokens` tokens, may be sent."""
        if not self._request_s and not self._token_s:
            return
        async with self._turn:
            delay = max(self._free_at, self._paid_at) - self._now()
            if delay > 0.0:
                await self._sleep(delay)
            now = self._now()
            self._free_at = max(self._free_at, now) + self._request_s
            # Tokens are paid after the call, so that one larger than the rate of a minute still goes.
            self._paid_at = max(self._paid_at, now) + tokens * self._token_s

    def settle(self, tokens: int) -> None:
        self._paid_at += tokens * self._token_s


HEAD = 200  # characters of a reply in a message
_LINE = re.compile(
    r"[\s#*_`]*verdict[\s*_`]*:[\s*_`]*(?P<word>yes|no|[01](?:\.[0-9]+)?|\.[0-9]+)[\s.*_`]*", re.I | re.A
)
_STATED = re.compile(  # at the beginning of a line, whatever follows; quoted and listed ones too
    r"[\s>#*_`0-9.)+-]*(?:(?:my|the|final)\s+){0,3}verdict[\s*_`]*:[\s*_`]*(?:yes\b|no\b|\.?[0-9])", re.I | re.A
)
# No other separator ends the last line: a quotation may hold any.
_NEWLINE = re.compile(r"\r\n?|\n")
_WORDS = {"yes": 1.0, "no": 0.0}


def read_verdict(reply: str, *, was_cut: bool = False) -> Score:
    """Read the verdict: `VERDICT: yes` is 1, `no` 0, a number in [0, 1] itself.

    Only the last line counts. With another last line, a quoted one, or a second line that begins with a verdict, even
    the same, there is no verdict. `was_cut`: the reply reached its token limit, named as the reason then.
    """
    lines = [line for line in _NEWLINE.split(reply) if line.strip()]
    last = _value(lines[-1]) if lines else None
    if last is None:
        reason = "was cut off by judge_max_tokens" if was_cut else "does not end in a verdict"
        return Score.no_verdict(f"the judge's reply {reason}: {head(reply)!r}")
    stated = sum(_STATED.match(line) is not None for line in reply.splitlines())
    if stated > 1:
        return Score.no_verdict(f"the judge's reply has {stated} verdicts: {head(reply)!r}")
    return Score.of(last)


def head(text: str) -> str:
    line = " ".join(text[: 4 * HEAD].split())
    return line if len(line) <= HEAD else line[:HEAD] + "..."


def _value(line: str) -> float | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    word = match["word"].lower()
    value = _WORDS[word] if word in _WORDS else float(word)
    return value if value <= 1.0 else None
