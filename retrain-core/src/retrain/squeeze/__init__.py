"""LoRA-Squeeze: which rank an adapter really needs. The table stands; the analysis is to come."""
