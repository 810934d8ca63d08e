from shared import QUESTIONS, ask, load

model, tokenizer = load()
assistant, _ = load()
for question in QUESTIONS:
    print(ask(model, tokenizer, question, assistant_model=assistant)[0].tolist())
