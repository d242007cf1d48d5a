"""Tokenizers of a run: ours for plain folders, those of `transformers` for the others."""
