"""A model whose layers lie on several devices (`device_map`): each layer's blocks are where the layer is.

pip install accelerate; python examples/multi_gpu.py [--model FOLDER_OR_NAME]
"""

from __future__ import annotations

import argparse
from collections import Counter

from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_max_memory

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

PROMPT = "A list of ten animals, each with the sound that it makes.\n" * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    given = parser.parse_args()

    # As AutoModelForCausalLM.from_pretrained(..., device_map="auto") does it.
    model, tokenizer = load_demo_model(given.model)
    device_map = infer_auto_device_map(
        model, max_memory=get_max_memory(), no_split_module_classes=model._no_split_modules
    )
    model = dispatch_model(model, device_map=device_map)
    cache = PagedPrefixCache(model)
    for question in ("1. cow:", "1. cat:"):
        inputs = tokenizer(PROMPT + question, return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs.to(model.device), past_key_values=cache, max_new_tokens=4, do_sample=False)
        print(f"{question} {cache.last_call.reused_tokens} of {cache.last_call.prompt_tokens} prompt tokens reused")
    devices = Counter(str(layer.keys.device) for layer in cache.layers)
    print("layers on " + ", ".join(f"{device}: {number}" for device, number in devices.items()))


if __name__ == "__main__":
    main()
