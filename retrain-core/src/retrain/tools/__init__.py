"""Tools around training: squeeze (the rank that an adapter needs), capacity (does it fit), doctor, pack and rerun.

Each folder is a plugin that may be deleted, and begins with its command. No tool imports another.
"""
