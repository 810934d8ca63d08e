from multiprocessing import get_context

from shared import QUESTIONS, ask, load

model, tokenizer = load()
print(ask(model, tokenizer, QUESTIONS[0])[0].tolist())


def answer(question):
    return ask(model, tokenizer, question)[0].tolist()


if __name__ == "__main__":
    with get_context("fork").Pool(2) as pool:
        for each in pool.map(answer, QUESTIONS):
            print(each)
