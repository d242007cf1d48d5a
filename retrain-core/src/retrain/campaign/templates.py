"""The text of the campaigns that `retrain init` writes."""

CAMPAIGN = """\
# retrain: a campaign, conditions x seeds. Run it with: retrain campaign.toml (again, to finish missing runs)

[campaign]
seeds = [42, 101, 202, 303, 404, 505]
max_steps = 200
parallel = false                # true: several runs at a time, at most max_workers

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

# Everything below is the base configuration of all runs.

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
lora_rank = 32

[training]
batch_size = 8
group_size = 16
max_tokens = 10240
lr = 4e-5
save_every = 20

[sepa]
steps = 200
delay_steps = 20

[eval]
every = 50
examples = 64
samples = 4

[squeeze]                       # after the first run: which rank does the adapter need?
min_variance_retention = 0.95
"""

TINY = r"""# Two conditions x six seeds on your CPU, in minutes. Run it with: retrain campaign.toml

[campaign]
seeds = [42, 101, 202, 303, 404, 505]    # six are the fewest that can give two conditions a verdict
max_steps = 12
parallel = true
max_workers = 2             # the small model keeps one core busy

[[campaign.conditions]]     # the first is the baseline
advantage_mode = "grpo"
transform_mode = "none"

[[campaign.conditions]]     # change one thing; for a comparison of algorithms: recipe = "dapo", say
advantage_mode = "grpo"
transform_mode = "none"
lr = 3e-3

[campaign.plan]             # fixed before the first step, so that the verdict cannot be chosen afterwards
hypothesis = "three times the learning rate answers more held-out questions after 12 steps"

# Everything below is the base configuration of all runs.

[model]
model = "builtin:tiny"
lora_rank = 16

[backend]
backend = "local"
devices = "cpu"

[training]
batch_size = 8
group_size = 8
max_tokens = 64
temperature = 1.0
lr = 1e-3
save_every = 12
keep_last = 1

[data]
source = "arithmetic"
instruction = 'Put your final answer in \boxed{}.'

[reward]
type = "match"

[eval]                      # on examples that are never trained on
every = 12
examples = 64
samples = 4
seed = 0
"""
