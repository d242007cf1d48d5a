"""How parts are found by name: specs, registries, entry points, dotted paths, and the message when one is missing."""
