"""What a run leaves on disk, written and read: folder, checkpoints, metrics, completions, tokens, identity.

Begin with `record_names.py`, the files; `folder.py` writes them and `run.py` reads them; `identity/` tells whether
code, data and keys are still those of the run. Imports the kernel and `text`: who looks at a run loads nothing that
could make one.
"""
