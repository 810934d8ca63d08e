"""LoRA adapters that take turns on one model: each has blocks of its own, found again when its turn comes back.

pip install peft; python examples/adapters.py [--model FOLDER_OR_NAME]
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

PROMPT = "You are a careful assistant. Answer in one short sentence.\n" * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config, adapter_name="polite")
    adapted.add_adapter("terse", config)
    adapted.eval()
    cache = PagedPrefixCache(adapted)
    for question in ("What is ice?", "What is snow?"):
        inputs = tokenizer(f"{PROMPT}{question}", return_tensors="pt", return_token_type_ids=False).to(model.device)
        for adapter in ("polite", "terse"):
            adapted.set_adapter(adapter)
            adapted.generate(**inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
            call = cache.last_call
            print(f"{question} {adapter}: {call.reused_tokens} of {call.prompt_tokens} prompt tokens reused")


if __name__ == "__main__":
    main()
