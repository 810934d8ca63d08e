"""The batch job on workers of Ray: prompts that share a prefix go to one worker; one that dies is replaced.

pip install 'ray>=2.50'; python examples/ray_batch.py [--model FOLDER_OR_NAME] [--workers 2] [--address auto]
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from hf_paged_cache import PagedCacheError, generate_all_on_ray
from hf_paged_cache.cli.demo_model import load_demo_model, require_name

REVIEWS = [json.loads(line) for line in Path(__file__).with_name("reviews.jsonl").read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--address", help="of a cluster; default: a new one on this machine")
    parser.add_argument("--questions", type=int, default=16, help="of each of two tasks")
    given = parser.parse_args()

    shots = REVIEWS[:6]
    asked = REVIEWS[6 : 6 + given.questions]
    tasks = {
        "Sentiment": "".join(f"Review: {each['text']}\nSentiment: {each['label']}\n\n" for each in shots),
        "Words": "".join(f"Review: {each['text']}\nWords: {len(each['text'].split())}\n\n" for each in shots),
    }
    prompts = [f"{text}Review: {each['text']}\n{task}:" for each in asked for task, text in tasks.items()]
    try:
        if given.model:
            require_name(given.model)  # a mistyped folder is found here, not on the workers
        result = generate_all_on_ray(
            partial(load_demo_model, given.model),
            prompts,
            num_workers=given.workers,
            address=given.address,
            max_new_tokens=3,
        )
    except PagedCacheError as error:
        raise SystemExit(str(error)) from None
    for prompt, completion in zip(prompts[:4], result.completions or (), strict=False):
        print(f"{prompt.rpartition('Review: ')[2]!r} ->{completion.partition(chr(10))[0]}")
    print(result.summary)


if __name__ == "__main__":
    main()
