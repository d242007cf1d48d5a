"""Environments of the `verifiers` library, both of its generations: classic (`load_environment`) and v1 (tasksets)."""
