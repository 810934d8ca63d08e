"""Questions about one image: its tower runs once, and its tokens are computed once, whatever is asked about it.

python examples/chat_about_an_image.py                                    a small model of SmolVLM's kind, drawn at
random: no download python examples/chat_about_an_image.py --model NAME --image PICTURE.jpg   your own, by its
processor: you type the questions
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, SmolVLMConfig, SmolVLMForConditionalGeneration

from hf_paged_cache import PagedPrefixCache

IMAGE_TOKEN, VOCABULARY = 4095, 4096


def drawn_at_random() -> Any:
    """SmolVLM in small: pictures of 512 pixels a side, 64 tokens each."""
    torch.manual_seed(0)
    vision = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 3}
    text = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 9}
    config = SmolVLMConfig(
        vision_config={**vision, "image_size": 512, "patch_size": 16},
        text_config={"model_type": "llama", **text, "num_key_value_heads": 3, "vocab_size": VOCABULARY},
        image_token_id=IMAGE_TOKEN,
        scale_factor=4,
        pad_token_id=0,
    )
    model = SmolVLMForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model


def random_prompts(num_crops: int, num_questions: int) -> Iterator[dict[str, torch.Tensor]]:
    """One image in so many crops of 64 tokens, and each time another question of 12 tokens."""
    image = torch.randn(1, num_crops, 3, 512, 512, generator=torch.Generator().manual_seed(1))
    for number in range(num_questions):
        question = torch.randint(1, IMAGE_TOKEN, (12,), generator=torch.Generator().manual_seed(2 + number))
        ids = torch.cat([torch.arange(1, 9), torch.full((64 * num_crops,), IMAGE_TOKEN), question])[None]
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": image}


def typed_prompts(processor: Any, picture: str) -> Iterator[Any]:
    """One image, and each line of the terminal."""
    for line in sys.stdin:
        content = [{"type": "image", "path": picture}, {"type": "text", "text": line.strip()}]
        yield processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; without: drawn at random")
    parser.add_argument("--image", help="a picture's file, with --model")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--crops", type=int, default=16, help="of the random image, 64 tokens each")
    parser.add_argument("--max-new-tokens", type=int, default=1)
    given = parser.parse_args()
    if (given.model is None) != (given.image is None):
        parser.error("--model and --image go together")

    if given.model is None:
        processor, model = None, drawn_at_random()
        prompts: Iterator[Any] = random_prompts(given.crops, given.questions)
    else:
        processor = AutoProcessor.from_pretrained(given.model)
        model = AutoModelForImageTextToText.from_pretrained(given.model)
        prompts = typed_prompts(processor, given.image)
    cache, seconds, same = PagedPrefixCache(model), [0.0, 0.0], True
    for inputs in prompts:
        outputs = []
        for number, held in enumerate((None, cache)):
            begun = time.perf_counter()
            outputs.append(
                model.generate(**inputs, past_key_values=held, max_new_tokens=given.max_new_tokens, do_sample=False)
            )
            seconds[number] += time.perf_counter() - begun
        same = same and outputs[0].equal(outputs[1])
        call = cache.last_call
        print(f"{call.reused_tokens} of {call.prompt_tokens} prompt tokens reused")
        if processor is not None:
            print(processor.decode(outputs[1][0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"DynamicCache {seconds[0]:.1f} s, PagedPrefixCache {seconds[1]:.1f} s: {seconds[0] / seconds[1]:.1f}x")
    print(f"the same tokens: {same}")


if __name__ == "__main__":
    main()
