"""The configuration that `retrain init --template tiny` writes."""

from __future__ import annotations

TINY = r"""# A language model learns arithmetic on your CPU, in about a minute. Run it with: retrain

[model]
model = "builtin:tiny"      # ships with retrain-local; any hub id or local folder works here too
lora_rank = 16

[backend]
backend = "local"
devices = "cpu"             # gpu:0 for a CUDA device

[algorithm]
advantage_mode = "maxrl"    # credit per completion: grpo | maxrl
transform_mode = "gtpo_sepa"  # credit per token: none | gtpo | gtpo_hicra | gtpo_sepa

[sepa]
steps = 40                  # lambda rises to 1 within these steps ...
delay_steps = 5             # ... after these

[training]
seed = 1
max_steps = 70
batch_size = 8              # prompts per step
group_size = 16             # completions per prompt
max_tokens = 64
temperature = 1.0
lr = 3e-3
save_every = 20

[data]
source = "arithmetic"
instruction = 'Put your final answer in \boxed{}.'

[reward]
type = "match"

[eval]                      # on examples that are never trained on
every = 20
examples = 64
samples = 4
seed = 0

[logging]
log_dir = "logs/tiny"
"""
