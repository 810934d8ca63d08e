"""Best of n: n samples of one prompt, of which the one the model finds most likely is kept. The prompt is computed
once.

python examples/best_of_n.py [--model FOLDER_OR_NAME] [--samples 8] [PROMPT]
"""

from __future__ import annotations

import argparse

import torch

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model


def up_to_its_end(tokens: list[int], end: int | list[int] | None) -> list[int]:
    """A sample without what fills its row; its end of sequence is a token that the model chose, and counts."""
    ends = end if isinstance(end, list) else [end]
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", nargs="?", default="The best way to learn to cook is")
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    cache = PagedPrefixCache(model)
    inputs = tokenizer(given.prompt, return_tensors="pt", return_token_type_ids=False).to(model.device)
    torch.manual_seed(0)
    samples = model.generate(
        **inputs,
        past_key_values=cache,
        do_sample=True,
        num_return_sequences=given.samples,
        max_new_tokens=given.max_new_tokens,
    )
    print(f"computed {cache.last_call.computed_tokens} prompt tokens for {given.samples} samples")

    # `score` reads the same blocks: what a sample has in common with the prompt is not computed again.
    start = inputs.input_ids.shape[1]
    continuations = [up_to_its_end(row[start:].tolist(), model.generation_config.eos_token_id) for row in samples]
    scores = cache.score(inputs.input_ids[0], continuations)
    best = max(range(len(scores)), key=lambda number: scores[number].total / scores[number].num_tokens)
    print(f"sample {best}: {tokenizer.decode(continuations[best], skip_special_tokens=True).strip()}")


if __name__ == "__main__":
    main()
