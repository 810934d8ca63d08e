"""A few-shot evaluation: the examples before each question are computed once, for all batches.

python examples/few_shot_eval.py [--model FOLDER_OR_NAME] [--shots 12] [--questions 24] [--batch-size 8]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

REVIEWS = [json.loads(line) for line in Path(__file__).with_name("reviews.jsonl").read_text("utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--shots", type=int, default=12)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=8)
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    cache = PagedPrefixCache(model)
    shots = "".join(f"Review: {each['text']}\nSentiment: {each['label']}\n\n" for each in REVIEWS[: given.shots])
    asked = REVIEWS[given.shots : given.shots + given.questions]

    num_right, start = 0, time.perf_counter()
    for first in range(0, len(asked), given.batch_size):
        batch = asked[first : first + given.batch_size]
        texts = [f"{shots}Review: {each['text']}\nSentiment:" for each in batch]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False).to(model.device)
        output = model.generate(**inputs, past_key_values=cache, max_new_tokens=3, do_sample=False)
        answers = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        num_right += sum(answer.strip().startswith(each["label"]) for answer, each in zip(answers, batch, strict=True))
    stats = cache.stats()
    print(f"{num_right} of {len(asked)} right in {time.perf_counter() - start:.1f} s")
    saved = 1 - stats.computed_tokens / stats.prompt_tokens
    print(
        f"computed {stats.computed_tokens} of {stats.prompt_tokens} prompt tokens ({saved:.0%} saved): "
        f"{stats.reused_tokens} were reused, {stats.shared_tokens} shared by rows of a batch"
    )


if __name__ == "__main__":
    main()
