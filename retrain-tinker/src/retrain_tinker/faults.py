"""Turns the failures of a Tinker service into errors that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from retrain.api import BackendError, ConfigError, Problem, RetrainError

HOSTED = "the hosted Tinker service"
LONGEST = 400  # characters shown of a foreign message
# By a pattern in the message; the first match counts, before the status.
_KNOWN = {
    r"api_key|TINKER_API_KEY": Problem(
        code="tinker.no-key",
        what="there is no usable key for the service",
        fix="put your key into the environment variable TINKER_API_KEY; a server of your own takes any that begins "
        "with tml-",
    ),
    r"LoRA rank \d+ must be between": Problem(
        code="tinker.bad-rank",
        what="the service has no adapter of this rank",
        fix="lower [model] lora_rank, or start the server with a larger max_lora_rank",
    ),
    r"Maximum number of LoRA adapters|max_lora_adapters": Problem(
        code="tinker.no-room",
        what="the server has no room for another adapter",
        fix="wait five minutes, until adapters of dead runs are dropped, or start it with more max_lora_adapters",
    ),
    r"[Cc]heckpoint not found|Checkpoint creation failed": Problem(
        code="tinker.lost-weights",
        what="the service does not have these saved weights",
        fix="they were deleted or belong to another server: start again from a checkpoint that it has",
    ),
}
_DETAIL = re.compile(r"""['"]detail['"]: (?P<quote>['"])(?P<words>.*?)(?P=quote)\}""")
_BY_STATUS = {
    400: Problem(code="tinker.request-refused", what="the service refuses the request", fix="look at the server's log"),
    401: Problem(
        code="tinker.key-refused", what="the service refuses the key", fix="set TINKER_API_KEY to a valid key"
    ),
    402: Problem(
        code="tinker.no-credit",
        what="the account has no credit or no billing set up",
        fix="fix that on the service's console, then resume",
    ),
    403: Problem(code="tinker.forbidden", what="the key may not do this", fix="use a key of the run's project"),
    404: Problem(
        code="tinker.not-found",
        what="the service does not know the requested object",
        fix="check [model] base_url and [model] model",
    ),
    422: Problem(
        code="tinker.bad-request",
        what="the service does not understand the request",
        fix="check that SDK and server belong together",
    ),
    429: Problem(
        code="tinker.rate-limit",
        what="the service limits how fast it is called",
        fix="lower [backend] max_concurrent, or wait, then resume",
    ),
}


def safe_url(base_url: str) -> str:
    """Return the URL for messages: without credentials, or a name where the SDK chooses the URL."""
    return re.sub(r"(?<=://)[^/\s?#@]+@", "", base_url) or HOSTED


def timed_out(doing: str, base_url: str, timeout_s: float, key: str) -> BackendError:
    what = f"{doing}: no answer within {timeout_s:g} s"
    fix = f"check that the service is running; if it is only slow, raise [backend.options] {key}"
    if key == "connect_timeout_s":
        fix += "; SkyRL-tx supports only an old SDK: pip install tinker==0.16.1"
    return BackendError(Problem(code="tinker.timeout", where=safe_url(base_url), what=what, fix=fix))


def bad_answer(where: str, reason: str) -> BackendError:
    what, fix = f"the service's answer cannot be used: {reason}", "check that SDK and server belong together"
    return BackendError(Problem(code="tinker.bad-answer", where=where, what=what, fix=fix))


def unreachable(base_url: str, reason: str) -> BackendError:
    fix = "start the server, or correct [model] base_url (or TINKER_BASE_URL)"
    what = "no Tinker service answers"
    return BackendError(Problem(code="tinker.unreachable", where=safe_url(base_url), what=what, why=reason, fix=fix))


def explained(error: Exception, doing: str, base_url: str) -> RetrainError:
    """Return the SDK's error as a RetrainError: the action, the service's own message, and the smallest fix."""
    if isinstance(error, RetrainError):
        return error
    where, words = safe_url(base_url), " ".join(str(error).split()) or type(error).__name__
    if detail := _DETAIL.search(words):  # the service's own message, quoted by the SDK
        words = detail["words"]
    words = re.sub(r"(?<=://)[^/\s?#@]+@", "", words)
    words = words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."
    status = next((s for e in _causes(error) if isinstance(s := getattr(e, "status_code", None), int)), 0)
    known = next((problem for pattern, problem in _KNOWN.items() if re.search(pattern, words)), _BY_STATUS.get(status))
    if known is not None:
        kind = ConfigError if known.code == "tinker.no-key" else BackendError
        return kind(replace(known, where=where, what=f"{doing}: {known.what}", why=words))
    if any(type(e).__name__ in ("APIConnectionError", "APITimeoutError", "ConnectError") for e in _causes(error)):
        return unreachable(base_url, words)
    fix = "the run can be resumed from its last checkpoint"
    what = f"{doing} failed: {type(error).__name__}"
    return BackendError(Problem(code="tinker.failed", where=where, what=what, why=words, fix=fix))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
