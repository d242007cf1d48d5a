"""Memory of a run: sizes that the backend sets, limits that a run has settled on, and the estimate without torch.

Begin with `sizes.py`. It imports no other package of the backend.
"""
