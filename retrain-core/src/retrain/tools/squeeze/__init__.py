"""LoRA-Squeeze: which rank an adapter really needs, and the same adapter at a smaller one."""
