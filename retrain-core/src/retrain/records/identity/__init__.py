"""The inputs of a run next to its configuration: hashes of its code, data, model files and plugins, and copies."""
