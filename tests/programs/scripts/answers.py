"""Answers questions with a common beginning, with a model from a folder."""

import atexit
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SHOTS = "".join(f"Question: what is {n} and one? Answer: {n + 1}.\n" for n in range(12))
torch.set_num_threads(1)


def answers(folder):
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for number in range(2):
        text = f"{SHOTS}Question: what is {number} and two? Answer:"
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        yield model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)[0].tolist()


if __name__ == "__main__":
    atexit.register(print, "at exit")
    print(*answers(sys.argv[1]), sys.argv[1:], sys.path[0], sep="\n")
    sys.exit(3)
