"""Whole models from trained weights: merged as a folder of transformers, or as a GGUF file."""
