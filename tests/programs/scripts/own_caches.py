from shared import QUESTIONS, ask, load
from transformers import DynamicCache

model, tokenizer = load()
for question in QUESTIONS[:2]:
    print(ask(model, tokenizer, question, past_key_values=DynamicCache(config=model.config))[0].tolist())
    print(ask(model, tokenizer, question, cache_implementation="static", disable_compile=True)[0].tolist())
    print(ask(model, tokenizer, question, use_cache=False)[0].tolist())
    print(ask(model, tokenizer, question, prompt_lookup_num_tokens=2)[0].tolist())
