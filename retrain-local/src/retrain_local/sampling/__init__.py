"""Engine `pytorch`: continuous batching over pages of keys and values."""
