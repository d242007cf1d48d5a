"""Recorders besides the JSONL files: Weights & Biases and TensorBoard."""
