"""Tools around training: squeeze (which rank an adapter needs), capacity (does it fit), doctor, pack and rerun.

Each folder is a plugin that may be deleted; begin with the file that its `__init__.py` names. No tool imports
another.
"""
