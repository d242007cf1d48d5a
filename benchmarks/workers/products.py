"""What bare matrix products cost here: `python products.py SETTINGS.json`, one JSON object; CPU only.

Every product of `products` is [rows, outputs, inputs, times]: x (rows, inputs) with the transpose of a weight (outputs,
inputs). It is done with as many different weights as a pass through the model has (at most `copies`), so that they come
from memory where they do not fit into a cache. The faster of `F.linear` and of oneDNN with weights that were packed
beforehand counts, the least of several passes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

PASSES, LEAST_S = 3, 0.05  # a measurement has so many passes at least, and takes so long
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    """Measure and print."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    total_s, won = 0.0, []
    with torch.inference_mode():
        for rows, outputs, inputs, times in settings["products"]:
            x = torch.randn(rows, inputs, dtype=TYPES[settings["dtype"]])
            weights = [torch.randn(outputs, inputs, dtype=x.dtype) for _ in range(min(times, settings["copies"]))]
            plain_s = _pass_s([partial(torch.nn.functional.linear, x, weight) for weight in weights])
            packed_s = _packed_s(x, weights)
            total_s += min(plain_s, packed_s) / len(weights) * times
            won.append("packed" if packed_s < plain_s else "plain")
    print(json.dumps({"seconds": total_s, "threads": torch.get_num_threads(), "faster": won}))


def _packed_s(x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """Infinite where PyTorch was built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return float("inf")
    operations = torch.ops.mkldnn
    packed = [operations._reorder_linear_weight(weight, len(x)) for weight in weights]
    return _pass_s([partial(operations._linear_pointwise, x, w, None, "none", [], "") for w in packed])


def _pass_s(products: list[Callable[[], object]]) -> float:
    """Seconds of all of them, one after the other."""
    taken_s: list[float] = []
    while len(taken_s) <= PASSES or sum(taken_s) < LEAST_S:  # the first one warms up
        started = time.perf_counter()
        for product in products:
            product()
        taken_s.append(time.perf_counter() - started)
    return min(taken_s[1:])


if __name__ == "__main__":
    main()
