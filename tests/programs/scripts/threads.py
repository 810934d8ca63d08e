from concurrent.futures import ThreadPoolExecutor

from shared import QUESTIONS, ask, load

model, tokenizer = load()
with ThreadPoolExecutor(4) as pool:
    for answer in pool.map(lambda question: ask(model, tokenizer, question)[0].tolist(), QUESTIONS * 2):
        print(answer)
