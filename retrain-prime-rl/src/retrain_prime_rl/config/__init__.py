"""`retrain prime-rl-config`: writes the files that PRIME-RL's trainer and server take."""
