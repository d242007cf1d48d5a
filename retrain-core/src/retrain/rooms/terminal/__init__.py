"""What a run shows: its lines, and the panel below them on a terminal."""
