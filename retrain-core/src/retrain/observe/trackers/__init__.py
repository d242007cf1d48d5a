"""Recorders besides the JSONL files: Weights & Biases, TensorBoard, Trackio and MLflow."""
