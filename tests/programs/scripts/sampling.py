import torch
from shared import QUESTIONS, ask, load
from transformers import set_seed

model, tokenizer = load()
set_seed(1)
for question in QUESTIONS:
    print(ask(model, tokenizer, question, do_sample=True, num_return_sequences=2)[:, -5:].tolist())
print(torch.rand(2).tolist())
