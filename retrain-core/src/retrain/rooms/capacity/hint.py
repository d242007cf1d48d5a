"""Where the time of a run went, and the key to try where most of it went to one phase."""

from __future__ import annotations

from collections.abc import Mapping

from retrain.kernel.config.resolved import Config
from retrain.rooms.capacity.machine import device_kind

DOMINANT = 0.6  # of the time; sampling and training share it about evenly where both are near their limits
WAITING = 0.3  # scoring goes on while others are sampled: what is waited for is too much


def hint(shares: Mapping[str, float], config: Config) -> str:
    """`sampling 78 % with engine = 'pytorch': try ...`, or "" where no phase stands out or no key would help."""
    if shares.get("score", 0.0) >= WAITING:
        return f"waiting for scores {_percent(shares['score'])}: try [scoring] workers, or a faster [reward]"
    if config.backend.backend != "local":
        return ""
    has_gpu = device_kind(config.backend.devices) == "cuda"
    engine = config.value("inference.engine", "pytorch")
    if shares.get("sample", 0.0) >= DOMINANT:
        said = f"sampling {_percent(shares['sample'])} with engine = {engine!r}"
        if engine != "pytorch":
            return f"{said}: try more servers in [inference] url, or [inference] max_concurrent"
        return f'{said}: try [inference] kv_cache_dtype = "fp8", or engine = "vllm" on another GPU' if has_gpu else ""
    if shares.get("train", 0.0) >= DOMINANT and has_gpu:
        options = config.backend.options
        if not options.get("compile"):
            return f"training {_percent(shares['train'])}: try [backend.options] compile = true"
    return ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
