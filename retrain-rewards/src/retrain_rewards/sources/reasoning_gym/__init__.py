"""The `reasoning_gym` data source: tasks of that library, scored by its own verifiers."""
