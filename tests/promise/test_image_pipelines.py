"""The pipeline `image-text-to-text`, with the cache passed and in a block, gives what it gives without."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast, pipeline

from hf_paged_cache import PagedPrefixCache

from ..conformance.image_zoo import IMAGE_TOKEN, tiny
from ..reference import FROM_5_23

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}w5 "
)


def processor(model: Any) -> LlavaProcessor:
    """Words are w0 to w125; pictures are of the model's size."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *(f"w{n}" for n in range(126))])}
    inner = Tokenizer(models.WordLevel({**vocabulary, "<image>": IMAGE_TOKEN}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
        padding_side="left",
    )
    side = model.config.vision_config.image_size
    size = {"height": side, "width": side}
    return LlavaProcessor(
        CLIPImageProcessor(size=size, crop_size=size),
        tokenizer,
        patch_size=model.config.vision_config.patch_size,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def chat(picture: Any, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}]


def picture(seed: int) -> Any:
    pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy())


@FROM_5_23
def test_a_pipeline_reuses_an_image_with_the_cache_passed_and_in_a_block() -> None:
    model, layout = tiny("llava")
    ask = pipeline("image-text-to-text", model=model, processor=processor(model))
    how = {"max_new_tokens": 6, "return_full_text": False}
    cache = PagedPrefixCache(model, block_size=8)
    for number, text in enumerate(("w1 w2 w3 w4 w5 w6 w7 w8 w9", "w9 w8 w7", "w9 w8 w1")):
        for one in (picture(1), picture(2)):
            wanted = ask(text=chat(one, text), **how)
            with cache:
                assert ask(text=chat(one, text), **how) == wanted
            assert (cache.last_call.reused_tokens >= layout.num_tokens) == (number > 0)
            assert ask(text=chat(one, text), **how, generate_kwargs={"past_key_values": cache}) == wanted
            assert cache.last_call.computed_tokens < 8
    several = [chat(picture(seed), text) for seed, text in ((1, "w1 w2"), (2, "w3"), (1, "w4 w5 w6"))]
    wanted = ask(text=several, batch_size=3, **how)
    with cache:
        assert ask(text=several, batch_size=3, **how) == wanted
    cache.check()
