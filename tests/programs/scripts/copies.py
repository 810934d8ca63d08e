import copy
import gc
import io
import pickle
import weakref

import torch
from shared import QUESTIONS, ask, load

model, tokenizer = load()
print(ask(model, tokenizer, QUESTIONS[0])[0].tolist())
other = copy.deepcopy(model)
with torch.no_grad():
    other.get_output_embeddings().weight.mul_(-1)
third = pickle.loads(pickle.dumps(model))
file = io.BytesIO()
torch.save(model, file)
file.seek(0)
fourth = torch.load(file, weights_only=False)
for each in (model, other, third, fourth):
    print(ask(each, tokenizer, QUESTIONS[1])[0].tolist(), [*each.state_dict()][:2])
gone = weakref.ref(model)
del model, each
gc.collect()
print(gone())
