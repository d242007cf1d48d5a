"""What a run leaves on disk: run folder, manifest, metrics, completions, adapter checkpoints."""
