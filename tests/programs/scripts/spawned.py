"""What a program does so that processes which it starts have caches: a line in their own code."""

from multiprocessing import get_context

from shared import QUESTIONS, ask, load

from hf_paged_cache import cache_every_generate


def answer(with_caches):
    every = cache_every_generate() if with_caches else "no caches"
    model, tokenizer = load()
    answers = [ask(model, tokenizer, QUESTIONS[0])[0].tolist() for _ in range(2)]
    return answers, str(every)


if __name__ == "__main__":
    with get_context("spawn").Pool(1) as pool:
        for each in pool.map(answer, [False, True]):
            print(*each, sep="\n")
