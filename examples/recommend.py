"""Generative recommendation: what comes next of a catalogue, by a wide beam search that may write nothing else.

Each item is written as some tokens. `prefix_allowed_tokens_fn` lets a beam go on only as an item does, so the beams are
items, the likeliest first. The history is computed, held and, at each step, read once for all beams.

python examples/recommend.py [--model FOLDER_OR_NAME] [--beams 128] [HISTORY]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import product

from torch import Tensor

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

HISTORY = (
    "Last week: a warm red sweater, two green books, a cold blue pool. This week: a small white lamp. Next, they buy a"
)
CATALOGUE = product(
    ("big", "small", "new", "old", "warm", "cold"),
    ("red", "green", "blue", "white"),
    ("lamp", "book", "table", "sweater", "cup", "bike"),
)


def trie_of(items: Iterable[list[int]], end: int) -> dict[tuple[int, ...], list[int]]:
    """The beginning of an item -> the tokens with which items go on; a whole one goes on with `end`."""
    allowed: dict[tuple[int, ...], dict[int, None]] = {}
    for item in items:
        for place, token in enumerate([*item, end]):
            allowed.setdefault(tuple(item[:place]), {})[token] = None
    return {beginning: [*tokens] for beginning, tokens in allowed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("history", nargs="?", default=HISTORY)
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--beams", type=int, default=128, help="also how many items are ranked")
    parser.add_argument("--shown", type=int, default=3)
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    end = tokenizer.eos_token_id
    items = [tokenizer(" " + " ".join(words), add_special_tokens=False).input_ids for words in CATALOGUE]
    if given.beams > len(items):
        raise SystemExit(
            f"{given.beams} beams asked for; the catalogue has {len(items)} items, and each beam is another one"
        )
    allowed = trie_of(items, end)
    inputs = tokenizer(given.history, return_tensors="pt", return_token_type_ids=False).to(model.device)
    start = inputs.input_ids.shape[1]

    def allowed_next(_: int, ids: Tensor) -> list[int]:
        return allowed.get(tuple(ids[start:].tolist()), [end])  # of a beam that has ended, or that no item begins with

    cache = PagedPrefixCache(model)
    output = model.generate(
        **inputs,
        past_key_values=cache,
        do_sample=False,
        num_beams=given.beams,
        num_return_sequences=given.beams,
        max_new_tokens=1 + max(map(len, items)),
        prefix_allowed_tokens_fn=allowed_next,
        eos_token_id=end,
        pad_token_id=end,
    )
    ranked = [tuple(token for token in row[start:].tolist() if token != end) for row in output]
    for number, item in enumerate(ranked[: given.shown], 1):
        print(f"{number}. {tokenizer.decode(item).strip()}")
    num_of_catalogue = len({*ranked} & {*map(tuple, items)})
    call = cache.last_call
    print(f"{num_of_catalogue} different items of {len(items)} by {given.beams} beams")
    print(f"computed {call.computed_tokens} tokens of {call.prompt_tokens} in the prompts of all beams")


if __name__ == "__main__":
    main()
