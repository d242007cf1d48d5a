"""The `config.json` of models of known size."""

QWEN3_4B = {"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36}
QWEN3_4B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3_4B |= {"tie_word_embeddings": True, "max_position_embeddings": 262144}
SMALL = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10}
