"""`[inference]`: which engine draws completions, and how."""

from __future__ import annotations

from retrain.config.keys import Table, key
from retrain.declared import Kind

KERNEL_CHOICE = "only the default attention of the model is built"
DTYPE_CHOICE = "only the training dtype is built"


class InferenceTable(Table):
    """Which engine draws completions, and how."""

    engine: str = key("pytorch", "pytorch, or a server: max, vllm, sglang, mlx, openai.", names=Kind.INFERENCE_ENGINE)
    url: str = key("", "Server URL.", pending="engines behind a URL are not built yet")
    attention_kernel: str = key(
        "default", "default, flash, triton, tk or cutlass.", flag="attention_kernel", pending=KERNEL_CHOICE
    )
    dtype: str = key("auto", "auto, bf16, fp8 or fp4.", pending=DTYPE_CHOICE)
    kv_cache_dtype: str = key("auto", "auto, bf16, fp8 or int8.", flag="kv_cache_dtype", pending=DTYPE_CHOICE)
    prefix_caching: bool = key(True, "Compute a prompt's keys and values once for its group.", flag="prefix_caching")
