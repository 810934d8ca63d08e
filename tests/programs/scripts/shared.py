"""What programs begin with: a model and its tokenizer from a folder, and prompts with a common beginning."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = sys.argv[1]
SHOTS = "".join(f"Question: what is {n} and one? Answer: {n + 1}.\n" for n in range(12))
QUESTIONS = [f"{SHOTS}Question: what is {n} and two? Answer:" for n in range(4)]

torch.set_num_threads(1)


def load():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(FOLDER), tokenizer


def ask(model, tokenizer, text, **how):
    inputs = tokenizer(text, return_tensors="pt", padding=True, return_token_type_ids=False)
    how = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": tokenizer.pad_token_id, **how}
    return model.generate(**inputs, **how)
