"""Estimates the memory of backend `local` for a model and a workload from their sizes, without torch."""
