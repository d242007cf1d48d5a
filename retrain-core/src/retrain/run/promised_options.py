"""Options that the documentation promises, apart from the parts that take them so that `retrain --help` stays light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# By backend, the options that the documented full configuration holds at their defaults, whichever backend it selects.
PROMISED_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "prime_rl": {
        "transport": "filesystem",
        "zmq_host": "localhost",
        "zmq_port": 5555,
        "zmq_hwm": 10,
        "strict_advantages": True,
        "sync_wait_s": 30,
        "sync_poll_s": 0.2,
    }
}
