"""Servers that sample for a run: vLLM, SGLang, MLX, MAX, any OpenAI-compatible one, and fleets of them.

Begin with `engine.py` (what a backend calls); `handshake.py` and `comparison.py` check that a server computes what the
policy does, `keeper.py` its health. Imports nothing of campaigns; engine `pytorch` lives in retrain-local.
"""
