"""What tests share; the first line of each module says what it offers.

- Runs: `shared` (made once, first or long), `made_runs` (run folders without training), `overlapped`, `invoke`,
  `clean_environment`, `interrupts`, `wandb_log`.
- Code of users: `user_rewards`, `child_targets`, `hostile_acts`.
- Models and rows: `random_models`, `hf_models`, `causal_types`, `model_configs`, `toy_policy`, `tinker_toy`,
  `tinker_rows`, `sampled_rows`, `scored_tokens`, `engine_record`, `playing`, `triton_interpreter`.
- Servers: `server_process`, `inference_server`, `tiny_server`, `mlx_server`, `tinker_server`,
  `judge_server`, `hub_server`, `openenv_server`, `openenv_game`, `mcp_calculator`, `slurm_stand_in`, `slurm_cluster`,
  `ray_placement`, `reasoning_gym_entries`.
- A GPU that is not there: `fake_gpu`.
- Pages: `browser`, `devtools`. Counts: `prose`.
"""
