import torch
from peft import LoraConfig, get_peft_model
from shared import QUESTIONS, ask, load

model, tokenizer = load()
torch.manual_seed(3)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, target_modules="all-linear"))
for _ in range(2):
    print(ask(model, tokenizer, QUESTIONS[0])[0].tolist())
    with model.disable_adapter():
        print(ask(model, tokenizer, QUESTIONS[0])[0].tolist())
