"""What the factory of each kind returns: the contracts that built-in and outside plugins share.

| kind | the factory is | called |
|---|---|---|
| advantage, transform, uncertainty, algorithm | see `retrain.advantages` | once per run |
| algorithm with `traits=Needs(...)` | `f(context) -> Algorithm` of `contracts.algorithm` | once per run |
| detector, controller, reward, data source, environment | `f(context) -> protocol below` | once per run |
| backend, recorder, health monitor | `f(context) -> protocol below` | once per run |
| pacer | `f(context) -> Pacer` of `retrain.kernel.contracts.pacing` | once per run |
| sampler | `f(context, examples) -> Sampler` of `retrain.tasks.sampling` | once per run |
| inference engine | `f(context, policy) -> Engine`, see `retrain.engines.policy` | once per run |
| config table | a pydantic model with `extra="forbid"` | once per command |
| launcher | `f(context) -> Launcher`, see `retrain.campaign.launching` | once per campaign |
| command | a `click.Command` | when typed |
| init template | the text of the TOML file | when asked for |
"""
