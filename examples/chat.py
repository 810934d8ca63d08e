"""A chat in the terminal: each turn passes the whole conversation, and computes what is new of it.

python examples/chat.py [--model FOLDER_OR_NAME] [--max-new-tokens 128]; an empty line ends it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from transformers import TextStreamer

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_demo_model


def as_inputs(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """The conversation as the model reads it: by its chat template, or as plain lines where it has none."""
    if tokenizer.chat_template is not None:
        text, special = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), False
    else:
        text = "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant:"
        special = True
    return tokenizer(text, return_tensors="pt", add_special_tokens=special, return_token_type_ids=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    cache = PagedPrefixCache(model)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    print("you: ", end="", flush=True)
    for line in sys.stdin:
        if not line.strip():
            break
        messages.append({"role": "user", "content": line.strip()})
        inputs = as_inputs(tokenizer, messages).to(model.device)
        output = model.generate(
            **inputs, past_key_values=cache, streamer=streamer, max_new_tokens=given.max_new_tokens, do_sample=False
        )
        answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        call = cache.last_call
        print(f"({call.reused_tokens} of {call.prompt_tokens} prompt tokens reused)\nyou: ", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
