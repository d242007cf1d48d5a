"""The environment `openenv`: tasks, interaction and rewards of a server written with OpenEnv."""
