"""What was trained, used: talked to, served, merged, exported, published."""
