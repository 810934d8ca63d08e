"""Beam search: what beams have in common is held once, and each has its own tokens behind it.

python examples/beam_search.py [--model FOLDER_OR_NAME] [--beams 4] [PROMPT]
"""

from __future__ import annotations

import argparse

from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", nargs="?", default="A haiku about the sea, and then one about the mountains:\n" * 8)
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    inputs = tokenizer(given.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    how = {"num_beams": given.beams, "max_new_tokens": given.max_new_tokens, "do_sample": False}
    plain = DynamicCache(config=model.config)
    wanted = model.generate(**inputs, **how, past_key_values=plain)
    cache = PagedPrefixCache(model)
    output = model.generate(**inputs, **how, past_key_values=cache)

    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True).strip())
    plain_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    print(f"the same tokens as with DynamicCache: {output.tolist() == wanted.tolist()}")
    print(
        f"keys and values of {given.beams} beams: {cache.last_call.peak_kv_bytes / 2**20:.2f} MiB, "
        f"DynamicCache {plain_bytes / 2**20:.2f} MiB"
    )


if __name__ == "__main__":
    main()
