"""How much memory backend `local` needs for a model and a workload, from sizes alone; torch is not imported."""
