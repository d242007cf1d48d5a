"""The manual and the JSON Schema of the configuration: what is installed, described from its own specs."""
