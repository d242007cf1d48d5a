"""Every name of the public `retrain` package is a name here, or is told what it became."""

import re
import tomllib

import pytest

from retrain.campaign.load import load_campaign
from retrain.kernel.config.load import all_keys, load_config
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.configure import load_with_problems
from retrain.run.public_package import PREFIXES, missing_name, names_in, note_on, note_on_entry
from retrain.run.tables import registered_tables

# Of 0.3.0, 0.3.1, 0.3.2 and the repository in July 2026.
KEYS = {
    "algorithm": """
        algorithm_mode advantage_mode transform_mode uncertainty_kind surprisal_mask_rho entropy_mask_rho params
        advantage_params transform_params
    """,
    "backend": "backend devices adapter_path throttle_dir max_concurrent options",
    "backpressure": """
        enabled warmup_steps ema_decay throttle_margin increase_margin min_batch_size max_batch_size peak_gflops
        peak_bw_gb_s
    """,
    "campaign": "seeds max_steps parallel max_workers stagger_seconds conditions summary_script summary_args",
    "data": "source",
    "echo": """
        enabled weight loss_fn target_retention max_tokens_per_step max_token_ratio entropy_floor
        min_prompt_overlap require_live_observation_bridge
    """,
    "environment": "provider id args max_turns auto_install rollout_env_workers rollout_buffer_size",
    "gtpo": "beta",
    "hicra": "alpha",
    "inference": "engine url attention_kernel dtype kv_cache_dtype prefix_caching",
    "logging": """
        log_dir wandb_project wandb_run_name wandb_entity wandb_group wandb_tags strategic_grams log_generations
        generation_log_samples_per_prompt generation_top_surprisal_limit checkpoint_artifacts
    """,
    "lora": "alpha dropout",
    "model": "model base_url lora_rank revision local_files_only",
    "optimizer": "beta1 beta2 eps grad_clip_norm",
    "optimizer_batch": "capture replay_path expected_logical_sha256 expected_manifest_sha256 allow_config_differences",
    "planning": "detector model threshold",
    "plugins": "strict search_paths",
    "resume": "from",
    "reward": "type judge_model custom_module custom_function",
    "sepa": "steps schedule delay_steps correct_rate_gate",
    "squeeze": "adapter_path source_rank target_ranks min_variance_retention output_path compress_to device",
    "training": """
        seed max_steps batch_size group_size max_tokens temperature top_p lr weight_decay clip_eps clip_eps_high
        clip_ratio_c adv_clip_max batch_advantage_norm max_examples save_every trainer trainer_command tl_grpo
        tl_grpo_branch_mode tl_grpo_branch_size tl_grpo_lookahead_steps tl_grpo_ema_decay tl_grpo_ema_init
        sft_warmup_steps sft_data_path sft_lr sft_loss_fn policy_loss_mode kl_cov_percent kl_cov_coef
        clip_cov_ratio clip_cov_min clip_cov_max sft_data_sha256 sft_data_rows sft_audit_path sft_audit_sha256
        sft_token_audit_path sft_token_audit_sha256 sft_batch_size sft_max_tokens sft_batch_order
        sft_length_bucket_size sft_reshuffle_each_epoch
    """,
    "tree": "name description nodes",
}
OPTIONS = """
    cuda_empty_cache cuda_expandable_segments cudnn_causal_conv1d_shim device_map fast_inference float8_kv_cache
    gpu_memory_utilization gradient_checkpointing gradient_checkpointing_skip_last_n
    gradient_checkpointing_use_reentrant liger_fused_linear_ce liger_kernel load_in_16bit load_in_4bit load_in_8bit
    lora_detach_input lora_fast_linear lora_freeze_a lora_layers_pattern lora_layers_to_transform
    lora_target_modules max_lora_rank max_seq_length offload_embedding qwen35_gated_delta_chunk_size
    qwen35_gated_delta_kernel random_state sample_kv_quantization sample_oscar_attn_implementation sample_oscar_bits
    sample_oscar_group_size sample_oscar_kv_norm sample_oscar_kv_rotation sample_oscar_quant_mode sample_oscar_repo
    sample_oscar_residual_block_size sample_use_cache strict_advantages strict_deterministic sync_poll_s sync_wait_s
    text_only train_compile_selective_ce train_compile_selective_ce_min_tokens train_logprob_chunk_size
    train_microbatch_size train_save_on_cpu train_save_on_cpu_min_numel train_save_on_cpu_pin_memory
    train_selective_suffix_logits train_sft_microbatch_token_budget train_supervised_context_tokens
    train_unsloth_fused_ce train_unsloth_fused_ce_target_gb train_unsloth_fused_ce_torch_compile transport
    trust_remote_code unsloth_tiled_mlp unsloth_tiled_mlp_mode use_exact_model_name use_gradient_checkpointing
    use_rslora zmq_host zmq_hwm zmq_port
"""
PARTS = {
    Kind.ADVANTAGE: "grpo maxrl reinforce_pp",
    Kind.TRANSFORM: """
        none gtpo gtpo_hicra gtpo_sepa gtpo_sepa_amp gtpo_sepa_amp_c entropy_mask delight delight_sepa hard_delight
    """,
    Kind.ALGORITHM: """
        grpo_none maxrl_none maxrl_gtpo maxrl_gtpo_hicra maxrl_gtpo_sepa reinforce_pp_none reinforce_pp_gtpo
        reinforce_pp_gtpo_sepa reinforce_pp_delight reinforce_pp_delight_sepa discover_entropic ttt_discover_entropic
    """,
    Kind.UNCERTAINTY: """
        surprisal token_surprisal neg_logprob negative_logprob nll shannon entropy token_entropy shannon_entropy
        varentropy predictive_variance pred_var bernoulli_variance
    """,
    Kind.BACKEND: "local unsloth tinker prime_rl",
    Kind.INFERENCE_ENGINE: "pytorch max vllm sglang trtllm mlx openai",
    Kind.REWARD: "match math judge custom",
    Kind.DATA_SOURCE: "math",
    Kind.ENVIRONMENT: "verifiers openenv",
    Kind.PLANNING_DETECTOR: "regex semantic",
    Kind.PACER: "usl",
}
OLD = """
[algorithm]
advantage_mode = "reinforce_pp"
transform_mode = "delight"

[training]
tl_grpo = true
clip_eps = 0.2
batch_advantage_norm = true

[backend]
backend = "unsloth"

[backend.options]
liger_kernel = true

[inference]
engine = "trtllm"

[echo]
enabled = true
"""
CAMPAIGN = """
[campaign]
seeds = [1, 2]

[[campaign.conditions]]
advantage_mode = "reinforce_pp"
transform_mode = "hard_delight"
batch_advantage_norm = true
clip_ratio_c = 3.0
echo_weight = 0.1
"""


@pytest.fixture(scope="module")
def installed():
    return load_plugins({})


def public_paths():
    for table, names in KEYS.items():
        yield from (f"{table}.{name}" for name in names.split())


def test_every_key_is_one_here_or_is_told(installed):
    keys = all_keys(registered_tables(installed))
    known = {key.path for key in keys} | {f"{key.table}.{alias}" for key in keys for alias in key.aliases}
    untold = [path for path in public_paths() if path not in known and not note_on(path)]
    assert [path for path in untold if not note_on(path.partition(".")[0])] == []
    stale = [path for path in known if note_on(path)]
    assert stale == []  # a row that nobody can meet


def test_every_option_of_its_local_backends_is_one_here_or_is_told(installed):
    own = {
        name
        for entry in installed.registered(Kind.BACKEND)
        if (model := entry.spec.load_params())
        for name in model.model_fields
    }
    assert [name for name in OPTIONS.split() if name not in own and not note_on(f"backend.options.{name}")] == []
    assert [name for name in own if note_on(f"backend.options.{name}")] == []


@pytest.mark.parametrize("kind", PARTS)
def test_every_part_is_one_here_or_is_told(installed, kind):
    for name in PARTS[kind].split():
        problem = missing_name(installed, kind, name, "here")
        assert bool(installed.find(kind, name)) == (problem is None), name
        assert problem is None or problem.fix.startswith(tuple(PREFIXES.values()))


def test_what_a_renamed_key_is_called_exists(installed):
    paths = {key.path for key in all_keys(registered_tables(installed))} | {"backend.options.micro_batch_tokens"}
    names = [*public_paths(), *(f"backend.options.{name}" for name in OPTIONS.split()), "transform entropy_mask"]
    notes = [note for name in names if (note := note_on(name)).startswith(PREFIXES["renamed"])]
    told = [found for note in notes for found in re.findall(r"\[([\w.]+)\] (\w+)", note)]
    assert len(told) >= 6
    assert [f"{table}.{key}" for table, key in told if f"{table}.{key}" not in paths] == []


def test_the_loader_tells_each(installed, tmp_path):
    file = tmp_path / "old.toml"
    file.write_text(OLD, encoding="utf-8")
    told = {p.where.removeprefix(f"{file}:"): p.fix for p in load_with_problems([str(file)], installed)[2]}
    assert "3 [algorithm] advantage_mode" not in told  # a name here, too, for another thing: the next note says so
    assert told["9 [training] batch_advantage_norm"].startswith(PREFIXES["renamed"] + "[algorithm] batch_norm")
    assert 'write "reinforce_pp_baseline" here' in told["9 [training] batch_advantage_norm"]
    assert told["4 [algorithm] transform_mode"].startswith(PREFIXES["none"])
    assert told["7 [training] tl_grpo"].startswith(PREFIXES["none"])
    assert told["8 [training] clip_eps"].startswith(PREFIXES["renamed"] + "[algorithm] clip_eps")
    assert told["12 [backend] backend"].startswith(PREFIXES["none"])
    assert told["18 [inference] engine"].startswith(PREFIXES["none"])
    assert told["20 [echo]"].startswith(PREFIXES["none"])


def test_an_option_of_the_other_local_backend_is_told(installed, tmp_path):
    file = tmp_path / "old.toml"
    file.write_text("[backend.options]\nliger_kernel = true\ncolour = 1\n", encoding="utf-8")
    fixes = [p.fix for p in load_with_problems([str(file)], installed)[2] if "backend" in p.where]
    assert fixes[0] == note_on("backend.options.liger_kernel")
    assert len(fixes) == 2
    assert fixes[1].startswith("known: ")


def test_a_condition_tells_each_under_its_flat_name(installed, tmp_path):
    file = tmp_path / "old.toml"
    file.write_text(CAMPAIGN, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_campaign([str(file)], installed)
    told = {p.where.partition("condition 1 ")[2]: p.fix for p in caught.value.problems}
    assert told["clip_ratio_c"] == note_on("training.clip_ratio_c")
    assert told["clip_ratio_c"].startswith(PREFIXES["renamed"] + "[algorithm] dual_clip")
    assert told["echo_weight"] == note_on("echo") != ""
    assert told["batch_advantage_norm"] == note_on("training.batch_advantage_norm") != ""
    assert note_on_entry("no_such_key") == ""
    built = {"training.sft_data_path": "[sft] path", "backend.options.load_in_4bit": '[model] quantize = "nf4"'}
    assert all(key in note_on(path) for path, key in built.items())


def test_names_in_a_document(installed, tmp_path):
    keys = all_keys(registered_tables(installed))
    assert [path for path, _ in names_in(tomllib.loads(OLD + CAMPAIGN), keys, installed)] == [
        *("algorithm.transform_mode", "training.tl_grpo", "training.clip_eps", "training.batch_advantage_norm"),
        *("backend.backend", "backend.options.liger_kernel", "inference.engine", "echo"),
        *("condition 1 transform_mode", "condition 1 batch_advantage_norm", "condition 1 clip_ratio_c"),
        "condition 1 echo_weight",
    ]
    config, problems = load_config(None, tables=registered_tables(installed))
    assert not problems
    assert list(names_in(config.as_dict(), keys, installed)) == []
    odd = {"training": 3, "campaign": {"conditions": [3, {"advantage_mode": 3}]}, "algorithm": {"advantage_mode": []}}
    assert list(names_in(odd, keys, installed)) == []


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("[algorithm]\nclip_eps = 0.2\n", True),  # the default as a number, but somebody set it
        ("[algorithm]\nclip_eps_high = 0.28\n", True),
        (
            '[algorithm]\nclip_eps = 0.2\nclip_eps_high = 0.0\nloss = "importance_sampling"\n',
            False,
        ),  # a run's own config.toml
        ('[algorithm]\nclip_eps = 0.3\nloss = "ppo"\n', False),
        ("", False),
    ],
)
def test_a_clip_without_a_loss_is_no_silent_nothing(installed, tmp_path, text, is_refused):
    file = tmp_path / "clip.toml"
    file.write_text(text, encoding="utf-8")
    problems = [p for p in load_with_problems([str(file)], installed)[2] if "clip" in p.where]
    assert bool(problems) is is_refused
    assert all('loss = "ppo"' in p.fix and ":2 [algorithm] clip_eps" in p.where for p in problems)
