"""Prompts with images in a job: chats whose messages have image parts, through the model's processor.

An image's placeholders are the same ids whatever image it is. So in a prompt's token ids, which say what prompts share and in what
order they run, numbers that hold a part of the images' digest stand in their place. Pixels are made when a prompt is read, for these
numbers, and once more when it runs: a job holds those of one prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from .rows import Messages, Prompt

FIRST_NAME = 1 << 31  # no token id is as large
_KINDS = ("image", "image_url", "video", "video_url")  # of parts of a message
_OF_TEXT = ("input_ids", "attention_mask")


class ChatTokens(array):  # type: ignore[type-arg]  # of int
    """The token ids of a chat with images, with names of these in their placeholders.

    Attributes:
        chat: its messages.
    """

    chat: Messages


def has_images(prompt: Prompt) -> bool:
    """Whether there are images or videos in the messages of a chat."""
    return not isinstance(prompt, str) and any(
        isinstance(part, dict) and part.get("type") in _KINDS
        for message in prompt
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def with_images(prompt: Prompt, files: Any) -> Prompt:
    """A text as a chat that asks it about images: a path, a URL or a picture, or a list of such; None: as it is."""
    if not files or not isinstance(prompt, str):
        return prompt
    pictures = [
        {"type": "image", "path" if isinstance(each, str) else "image": each}
        for each in (files if isinstance(files, list | tuple) else [files])
    ]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": prompt}]}]


def chat_inputs(processor: Any, chat: Messages) -> dict[str, Tensor]:
    """What `generate` takes for one chat, with the beginning of an answer."""
    return dict(
        processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
    )


def chat_tokens(processor: Any, chat: Messages, placeholders: Collection[int]) -> ChatTokens:
    """The token ids of a chat, and names in place of the placeholders."""
    inputs = chat_inputs(processor, chat)
    (ids,) = inputs["input_ids"].tolist()
    digest = hashlib.sha256()
    for name, value in sorted(inputs.items()):
        if name not in _OF_TEXT and isinstance(value, Tensor) and value.shape != inputs["input_ids"].shape:
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    name_of_images = FIRST_NAME | int.from_bytes(digest.digest()[:4], "little")
    tokens = ChatTokens("q", (name_of_images if id_ in placeholders else id_ for id_ in ids))
    tokens.chat = chat
    return tokens
