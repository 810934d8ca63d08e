"""Speculative decoding: drafts by looking in the prompt, or by an assistant model; what is rejected is taken back.

python examples/speculative.py [--model FOLDER_OR_NAME] [--assistant FOLDER_OR_NAME]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

TEXT = (
    "The lighthouse stands at the end of the pier. Its lamp was lit for the first time in 1874, "
    "and it has burned each night since. "
)
TASK = "Repeat the text, word by word.\nText: {text}\nRepeated: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--assistant", help="a smaller model with the same tokenizer")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    cache = PagedPrefixCache(model)
    inputs = tokenizer(TASK.format(text=TEXT), return_tensors="pt", return_token_type_ids=False).to(model.device)
    ways: dict[str, dict[str, Any]] = {"one by one": {}, "drafts from the prompt": {"prompt_lookup_num_tokens": 8}}
    if given.assistant:
        ways["drafts of an assistant"] = {"assistant_model": load_demo_model(given.assistant)[0]}
    outputs = []
    cache.prefill(inputs.input_ids[0])  # so that what differs is how the text continues
    for name, how in ways.items():
        start = time.perf_counter()
        output = model.generate(
            **inputs, **how, past_key_values=cache, max_new_tokens=given.max_new_tokens, do_sample=False
        )
        outputs.append(output.tolist())
        print(f"{name}: {time.perf_counter() - start:.2f} s, {cache.last_call.reused_tokens} prompt tokens reused")
    print(f"the same tokens: {all(output == outputs[0] for output in outputs)}")


if __name__ == "__main__":
    main()
