"""Evaluation: the held-out examples and further sets, during a run and of whatever was trained."""
