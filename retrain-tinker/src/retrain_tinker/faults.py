"""Turns the failures of a Tinker service into errors that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator

from retrain.api import BackendError, ConfigError, Problem, RetrainError

HOSTED = "the hosted Tinker service"
KEY_FIX = (
    "put your key into the environment variable TINKER_API_KEY; a server of your own takes any that begins with tml-"
)
SERVER_FIX = "check that SDK and server belong together"
LONGEST = 400  # characters shown of a foreign message
# Pattern in the message, problem and fix; the first match counts.
_KNOWN = (
    (
        r"LoRA rank \d+ must be between",
        "the service has no adapter of this rank",
        "lower [model] lora_rank, or start the server with a larger max_lora_rank",
    ),
    (
        r"Maximum number of LoRA adapters|max_lora_adapters",
        "the server has no room for another adapter",
        "wait five minutes, until it has dropped the adapters of dead runs, or start it with more max_lora_adapters",
    ),
    (
        r"[Cc]heckpoint not found|Checkpoint creation failed",
        "the service does not have these saved weights",
        "they were deleted or belong to another server: start again from a checkpoint that it has",
    ),
)
_DETAIL = re.compile(r"""['"]detail['"]: (?P<quote>['"])(?P<words>.*?)(?P=quote)\}""")
_BY_STATUS = {
    400: ("the service refuses the request", "see its own message above, and the server's log"),
    401: ("the service refuses the key", KEY_FIX),
    402: ("the account has no credit or no billing set up", "fix that on the service's console, then resume"),
    403: ("the key may not do this", "use a key of the project that this run belongs to"),
    404: ("the service does not know the requested object", "check [model] base_url and [model] model"),
    422: ("the service does not understand the request", SERVER_FIX),
    429: ("the service limits how fast it is called", "lower [backend] max_concurrent, or wait, then resume"),
}


def safe_url(base_url: str) -> str:
    """Return the URL for messages: without credentials, or a name where the SDK chooses the URL."""
    return re.sub(r"(?<=://)[^/\s?#@]+@", "", base_url) or HOSTED


def timed_out(doing: str, base_url: str, timeout_s: float, key: str) -> BackendError:
    what = f"{doing}: no answer within {timeout_s:g} s"
    fix = f"check that the service is running; if it is only slow, raise [backend.options] {key}"
    if key == "connect_timeout_s":
        fix += "; SkyRL-tx supports only an old SDK: pip install tinker==0.16.1"
    return BackendError(Problem(where=safe_url(base_url), what=what, fix=fix))


def unreachable(base_url: str, reason: str) -> BackendError:
    fix = "start the server, or correct [model] base_url (or TINKER_BASE_URL)"
    return BackendError(Problem(where=safe_url(base_url), what="no Tinker service answers", why=reason, fix=fix))


def explained(error: Exception, doing: str, base_url: str) -> RetrainError:
    """Return the SDK's error as a RetrainError: the action, the service's own message, and the smallest fix."""
    if isinstance(error, RetrainError):
        return error
    where, words = safe_url(base_url), " ".join(str(error).split()) or type(error).__name__
    if detail := _DETAIL.search(words):  # the service's own message, quoted by the SDK
        words = detail["words"]
    words = re.sub(r"(?<=://)[^/\s?#@]+@", "", words)
    words = words if len(words) <= LONGEST else f"{words[: LONGEST - 3]}..."
    if "api_key" in words or "TINKER_API_KEY" in words:
        return ConfigError(Problem(where=where, what="there is no usable key for the service", why=words, fix=KEY_FIX))
    for pattern, what, fix in _KNOWN:
        if re.search(pattern, words):
            return BackendError(Problem(where=where, what=f"{doing}: {what}", why=words, fix=fix))
    status = next((s for e in _causes(error) if isinstance(s := getattr(e, "status_code", None), int)), None)
    if status in _BY_STATUS:
        what, fix = _BY_STATUS[status]
        return BackendError(Problem(where=where, what=f"{doing}: {what}", why=words, fix=fix))
    if any(type(e).__name__ in ("APIConnectionError", "APITimeoutError", "ConnectError") for e in _causes(error)):
        return unreachable(base_url, words)
    fix = "the run can be resumed from its last checkpoint"
    return BackendError(Problem(where=where, what=f"{doing}: {type(error).__name__}", why=words, fix=fix))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
