"""Agents written elsewhere, in their own processes, whose calls to a model the policy answers."""
