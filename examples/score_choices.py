"""Multiple choice: which of some answers does a model find most likely? The question is computed once for all of them.

python examples/score_choices.py [--model FOLDER_OR_NAME]
"""

from __future__ import annotations

import argparse

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model

QUESTIONS = {
    "Question: Which of these melts in the sun?\nAnswer:": [" ice", " stone", " glass"],
    "Question: Which of these is a planet?\nAnswer:": [" the Moon", " Mars", " the Sun"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    cache = PagedPrefixCache(model)
    for question, answers in QUESTIONS.items():
        continuations = [tokenizer(answer, add_special_tokens=False).input_ids for answer in answers]
        scores = cache.score(tokenizer(question).input_ids, continuations)
        likely = max(zip(scores, answers, strict=True), key=lambda pair: pair[0].total / len(pair[0].log_probs))
        print(f"{question.partition(chr(10))[0]} {likely[1].strip()}")
        for score, answer in zip(scores, answers, strict=True):
            print(f"  {score.total:8.2f}{answer}")
    stats = cache.stats()
    print(f"computed {stats.computed_tokens} of {stats.prompt_tokens} tokens")


if __name__ == "__main__":
    main()
