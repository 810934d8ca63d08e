from shared import QUESTIONS, ask, load

model, tokenizer = load()
for _ in range(2):
    print(ask(model, tokenizer, QUESTIONS[:2], num_beams=3, num_return_sequences=2)[:, -5:].tolist())
