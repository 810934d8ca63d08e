import torch
from shared import QUESTIONS, ask, load

model, tokenizer = load()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
inputs = tokenizer(QUESTIONS[0], return_tensors="pt", return_token_type_ids=False)
for _ in range(3):
    model.eval()
    print(ask(model, tokenizer, QUESTIONS[:2])[:, -5:].tolist())
    model.train()
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"{loss.item():.4f}")
