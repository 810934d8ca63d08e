from shared import QUESTIONS, load
from transformers import pipeline

model, tokenizer = load()
pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
for batch_size in (1, 2):
    for answer in pipe(QUESTIONS, max_new_tokens=5, do_sample=False, batch_size=batch_size, return_full_text=False):
        print(answer)
