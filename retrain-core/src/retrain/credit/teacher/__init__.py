"""On-policy distillation: another model says of every sampled token how likely it would have been."""
