"""The devices of a run: which sample and which train, threads and determinism, and sums over ranks.

Begin with `torch_devices.py`. The processes of ranks are in `retrain_local.ranks`.
"""
