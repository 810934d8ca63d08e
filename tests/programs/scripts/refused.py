import torch
from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
ids = torch.arange(2, 50)[None]
mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4))
t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
for model, how in ((mamba, {}), (t5, {"decoder_start_token_id": 0})):
    for _ in range(2):
        print(
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, **how).tolist()
        )
