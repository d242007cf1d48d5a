"""Launcher `slurm`: each run is a task of a job array, on a cluster whose nodes see the campaign's folder."""
