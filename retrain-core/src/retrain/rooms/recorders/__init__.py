"""Recorders beside the JSONL files: Weights & Biases and TensorBoard."""
