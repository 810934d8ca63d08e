from functools import partial

from shared import QUESTIONS, ask, load
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

model, tokenizer = load()
early = model.generate  # looked up before any call


class Asks(LogitsProcessor):
    def __call__(self, input_ids, scores):
        inner = model.generate(input_ids[:, -20:], max_new_tokens=1, do_sample=False, pad_token_id=0)
        scores[:, inner[0, -1]] += 1.0
        return scores


class Stops(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return input_ids.shape[1] % 7 == 0


how = {"logits_processor": LogitsProcessorList([Asks()]), "stopping_criteria": StoppingCriteriaList([Stops()])}
for question in QUESTIONS[:2]:
    print(ask(model, tokenizer, question, **how)[0].tolist())
    inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
    print(partial(early, max_new_tokens=3, do_sample=False, pad_token_id=0)(**inputs)[0].tolist())
    print(type(model).generate(model, **inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)[0].tolist())
