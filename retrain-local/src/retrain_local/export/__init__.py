"""Whole models out of what was trained: merged weights as a folder of transformers, or as a GGUF file."""
