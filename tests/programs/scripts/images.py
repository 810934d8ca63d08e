import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, set_seed

set_seed(2)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
vision = CLIPVisionConfig(**sizes, image_size=32, patch_size=8, projection_dim=32)
text = LlamaConfig(**sizes, vocab_size=128, max_position_embeddings=512)
model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=127)).eval()
images = torch.randn(2, 3, 32, 32)
for question in ([3, 4, 5], [3, 4, 6, 7], [8]):
    for image in images:
        ids = torch.tensor([[1, *[127] * 16, *range(20, 60), *question]])
        given = {"attention_mask": torch.ones_like(ids), "pixel_values": image[None]}
        print(model.generate(ids, **given, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, -6:].tolist())
