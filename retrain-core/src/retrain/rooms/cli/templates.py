"""The text of the configurations that `retrain init` writes."""

DEFAULT = """\
# retrain: a run with the documented defaults. `retrain explain` shows what it does.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
lora_rank = 32

[algorithm]
advantage_mode = "maxrl"        # grpo | maxrl
transform_mode = "gtpo_sepa"    # none | gtpo | gtpo_hicra | gtpo_sepa

[training]
max_steps = 100
batch_size = 4                  # prompts per step
group_size = 16                 # completions per prompt
max_tokens = 10240
lr = 4e-5

[data]
source = "math"

[logging]
log_dir = "logs/my_run"
"""

QUICKSTART = """\
# retrain: a short, cheap smoke test of a real model. `retrain explain` shows what it does.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"

[algorithm]
advantage_mode = "grpo"
transform_mode = "none"

[training]
max_steps = 20
batch_size = 2
group_size = 8
max_tokens = 1024
save_every = 0                  # only the final adapter

[logging]
log_dir = "logs/quickstart"
"""

EXPERIMENT = """\
# retrain: a seeded run for comparisons, evaluated on held-out examples before, every 50 steps and after.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
lora_rank = 32

[algorithm]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

[training]
seed = 42
max_steps = 500
batch_size = 8
group_size = 16
max_tokens = 10240
save_every = 50

[sepa]
steps = 500
delay_steps = 50
correct_rate_gate = 0.1

[eval]
every = 50
examples = 64
samples = 4

[logging]
log_dir = "logs/experiment"
"""
