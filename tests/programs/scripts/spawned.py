from multiprocessing import get_context

from shared import QUESTIONS, ask, load


def answer(question):
    model, tokenizer = load()
    return [ask(model, tokenizer, question)[0].tolist() for _ in range(2)]


if __name__ == "__main__":
    with get_context("spawn").Pool(1) as pool:
        for each in pool.map(answer, QUESTIONS[:2]):
            print(each)
        pool.close()  # or leaving the block terminates the process, which says nothing then
        pool.join()
