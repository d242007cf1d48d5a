"""The manual and the JSON Schema of the configuration, generated from the specs of everything installed."""
