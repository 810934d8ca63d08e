"""Compute a few-shot prompt in one run, and have it in the first call of the next: run this twice with the same folder.

python examples/save_and_load.py saved_prompt [--model FOLDER_OR_NAME]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

PROMPT = "".join(
    f"Review: {text}\nSentiment: {label}\n\n"
    for text, label in [
        ("The battery lasts two days and charges in an hour.", "positive"),
        ("It stopped working after a week, and nobody answers my mails.", "negative"),
        ("The screen is bright, even in the sun.", "positive"),
        ("The hinge creaks, and the lid does not close.", "negative"),
    ]
)
QUESTION = "Review: I would buy it again at once.\nSentiment:"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    given = parser.parse_args()
    if given.folder.is_file():
        parser.error(f"{given.folder} is a file; give a folder")

    model, tokenizer = load_demo_model(given.model)
    cache = PagedPrefixCache(model)
    if given.folder.is_dir():
        loaded = cache.store.load(given.folder)
        print(f"loaded {loaded.num_blocks} blocks from {given.folder}; not loaded: {loaded.not_loaded or 'none'}")
    prefix = tokenizer(PROMPT).input_ids
    done = cache.prefill(prefix)
    print(f"the prompt's {len(prefix)} tokens: {done.num_known} known, {done.num_computed} computed")
    saved = cache.store.save(given.folder, [prefix])
    print(f"saved {saved.num_blocks} new blocks in {given.folder}")

    inputs = tokenizer(PROMPT + QUESTION, return_tensors="pt").to(model.device)
    start = time.perf_counter()
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False)
    answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    print(f"{answer.split()[0] if answer.split() else answer!r} ({1000 * (time.perf_counter() - start):.0f} ms)")


if __name__ == "__main__":
    main()
