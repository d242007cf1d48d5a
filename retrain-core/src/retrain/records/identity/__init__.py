"""The inputs of a run besides its configuration: hashes of its code, data, model files and plugins, and copies."""
