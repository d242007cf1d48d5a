"""The tiny model with a chat template that thinks, and the tags of its thoughts as tokens of their own."""

import json
import shutil
from pathlib import Path

# As Qwen3's: it drops the thoughts of earlier turns, opens none in the prompt, and closes one where thoughts are off.
QWEN3 = (
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
# As later ones: the prompt ends with the opening tag, and no switch turns thoughts off.
OPENED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning_content and keep %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{%- endif %}"
    "{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
# As that of gpt-oss: channels, all of whose tags are special tokens, and an effort in place of a switch.
HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + reasoning_effort|default('medium') + '<|end|>' }}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{#- '<|channel|>analysis<|message|>' -#}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
THINK = {"<think>": False, "</think>": False}  # whether each is a special token
CHANNELS = dict.fromkeys(("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"), True)


def thinking_model(folder: Path, template: str, tokens: dict[str, bool] = THINK) -> Path:
    """Write the model into `folder`, with a row of embeddings for each token."""
    import retrain_local

    shutil.copytree(Path(retrain_local.__file__).parent / "tiny", folder)
    tokenizer, options, config = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json")
    )
    first = config["vocab_size"]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, (content, special) in enumerate(tokens.items(), first):
        tokenizer["added_tokens"].append({"id": number, "content": content, **plain, "special": special})
    options["chat_template"] = template
    config["vocab_size"] = first + len(tokens)
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", options), ("config.json", config)):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    (name,) = (each for each in weights if "embed_tokens" in each)
    rows = 0.02 * torch.randn(len(tokens), weights[name].shape[1], generator=torch.Generator().manual_seed(0))
    weights[name] = torch.cat([weights[name], rows.to(weights[name].dtype)])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
