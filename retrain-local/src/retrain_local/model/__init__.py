"""The policy's weights: decoders, their adapters, and where they are read from."""
