"""The sandbox of completions' programs: bubblewrap around a bare interpreter, and the code that runs inside it.

Begin with `process.py`, the side of the scoring process. `start`, `inside`, `functions`, `checks`, `link` and `values`
are sent into the sandbox, and import only each other.
"""
