from __future__ import annotations

import numpy as np
import pytest

from retrain.api import SampleRequest
from tests.kit.local_backend import Local
from tests.kit.local_engines import Engines


@pytest.fixture(scope="session")
def engines(local: Local) -> Engines:
    rng = np.random.default_rng(5)
    requests = [
        SampleRequest(
            prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(100 * length, 100 * length + count))
        )
        for length, count in ((7, 4), (33, 4), (17, 1), (1, 2), (9, 3), (16, 2), (50, 2))
    ]
    return Engines(local=local, requests=requests)
