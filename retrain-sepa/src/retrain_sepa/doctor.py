"""What `retrain doctor` tells about this distribution: the extra of the semantic planning detector."""

from __future__ import annotations

from retrain.api import Config, Diagnosis, diagnose_extra


def diagnose(config: Config | None) -> list[Diagnosis]:
    """Whether the extra `semantic` is there, which `[planning] detector = "semantic"` needs."""
    needed = config is not None and config.value("planning.detector", "") == "semantic"
    return [diagnose_extra("retrain-sepa", "semantic", purpose="planning detector 'semantic'", needed=needed)]
