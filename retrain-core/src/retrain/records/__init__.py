"""What a run leaves on disk, written and read: folder, checkpoints, metrics, completions, tokens, identity.

Begin with `folder.py`, which writes, and `runs/source.py`, which reads; `identity/` tells whether code, data and keys
are still those of the run. Imports the kernel and `text`: who looks at a run loads nothing that could make one.
"""
