"""Discovery of plugins, and resolution of names: entry points, dotted paths, the message about a missing name."""
