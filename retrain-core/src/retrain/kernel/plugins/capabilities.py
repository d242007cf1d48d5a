"""What a backend promises, read from its registration."""

from __future__ import annotations

from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Capabilities, EngineTraits, Kind
from retrain.kernel.registry import Plugins


def declared_capabilities(config: Config, plugins: Plugins) -> Capabilities | None:
    """What the configured backend promises with the configured engine, without importing either; None = unknown."""
    entries = plugins.find(Kind.BACKEND, config.backend.backend)
    capabilities = entries[0].spec.traits if entries else None
    if not isinstance(capabilities, Capabilities):
        return None
    engines = plugins.find(Kind.INFERENCE_ENGINE, config.inference.engine)
    traits = engines[0].spec.traits if engines else None
    return traits.limit(capabilities) if isinstance(traits, EngineTraits) else capabilities
