"""What a run writes to disk: run folder, manifest, metrics, completions, adapter checkpoints."""
