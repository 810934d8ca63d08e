"""Reads images, token types, and how images move positions, from a forward's arguments.

All of this becomes a part of the images' names, or has no influence. Where it is not understood, the forward is
computed whole, and its call says why.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.image_tokens import name_image
from ..call.request import ForwardRequest, RowInput
from ..model.layers import cache_layers, has_index
from ..model.placeholders import Placeholders
from .forward_arguments import TOKEN_TYPES, RunningRows
from .prompt_images import Image, ImageReader, PromptImages

_NO_NAME = "an image at the beginning of a block has too few tokens for its digest, or ids are too large"
_NO_END = "the prompt ends with an image, so where the text after it stands is not known"
_NOT_PLACED = "positions beside the images do not count up by one"
_OTHER_IDS = "the ids that run are not those of the prompt"
_INDEXED = "layers weigh index keys by the positions of all columns, and images move these"
_RESUMES = "images are passed after rows that resume"
_PLAIN = ("input_ids", "attention_mask", "inputs_embeds", "kwargs", *TOKEN_TYPES)


class Seen(NamedTuple):
    """`Seen` holds what a forward's arguments say beside ids, mask and positions."""

    plain: Mapping[str, Any]  # the arguments without images, types of text, and positions of three numbers
    images: PromptImages | None = None  # those that begin with this forward
    shifts: Sequence[int | None] = ()  # of each row: how far its images have moved later positions; None: not known
    details: Sequence[Sequence[bytes]] = ()  # of each row, of each image: where it stands, and the types of its tokens
    why_whole: str | None = None  # why nothing may be reused or kept

    def named(self, request: ForwardRequest, block_size: int) -> tuple[Sequence[RowInput], str | None]:
        """Return the request's rows with the names of their images; or as they are, and why they are computed whole."""
        given = request.rows
        if len(self.shifts) == len(given):
            given = tuple(row._replace(shift=shift) for row, shift in zip(given, self.shifts, strict=True))
        if self.images is None or self.why_whole is not None or request.bypass is not None:
            return given, self.why_whole
        rows = []
        for number, row in enumerate(given):
            tokens = row.token_ids[:]
            for image, detail in zip(self.images.of_row(number, len(given)), self.details[number], strict=True):
                start, stop = image.start - row.pad, image.stop - row.pad
                if start < 0 or stop >= len(tokens):
                    return given, _NO_END
                if not name_image(tokens, start, stop, hashlib.sha256(image.digest + detail).digest(), block_size):
                    return given, _NO_NAME
            rows.append(row._replace(token_ids=tokens))
        return rows, None


class ImageInputs:
    """`ImageInputs` reads what the forwards of one model are passed beside ids, mask and positions of one number.

    Args:
        text_types: names of token types that condition nothing where they are 0: see `model.trial`.

    Attributes:
        takes_images: True if the model takes images.
        whole: names of arguments that keep all columns where only later tokens run.
    """

    def __init__(self, model: Any, placeholders: Placeholders, text_types: frozenset[str]) -> None:
        self._reader = ImageReader(model, placeholders)
        self.takes_images = bool(self._reader.names)
        self._text_types = text_types
        self._is_plain = not placeholders and not text_types
        place = getattr(getattr(model, "base_model", model), "get_rope_index", None)
        self._of_places = {*inspect.signature(place).parameters} - {*_PLAIN} if place is not None else set()
        self._has_index = any(map(has_index, cache_layers(model)))
        self.whole = ("attention_mask", *(name for name in text_types if _is_read_by_place(model, name)))

    def of_generate(self, passed: Mapping[str, Any]) -> PromptImages | None:
        """Return the images that a `generate` is not to be passed: it would run towers before known images are found.

        The first forward is then passed what the towers make of the images that it needs. None: there are no images, or
        they are not understood, and the `generate` runs as it is.
        """
        images = self._reader.read(passed)
        return images if isinstance(images, PromptImages) else None

    def see(self, arguments: Mapping[str, Any], rows: RunningRows, images: PromptImages | None) -> Seen:
        """Read what a forward is passed.

        Args:
            rows: rows that resume; none for a first forward.
            images: images that `generate` was passed; None: they are looked for among the arguments.
        """
        if self._is_plain:
            return Seen(arguments)
        found = images or self._reader.read(arguments)
        images, why = (None, found) if isinstance(found, str) else (found, None)
        plain = {name: value for name, value in arguments.items() if images is None or name not in images.arguments}
        if images is not None and rows.num_columns:
            return Seen(plain, images, why_whole=_RESUMES)
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return Seen(plain, images, why_whole=why)
        if images is not None and not images.fit(ids):
            return Seen(plain, images, [None] * len(ids), why_whole=_OTHER_IDS)
        spans = [images.of_row(number, len(ids)) if images is not None else () for number in range(len(ids))]
        inside = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
        for number, of_row in enumerate(spans):
            for image in of_row:
                inside[number, image.start : image.stop] = True
        types = [held for name in TOKEN_TYPES if (held := self._take_types(plain, name, inside)) is not None]
        shifts = [row.shift for row in rows.rows] or [0] * len(ids)
        placed = _placed(plain.get("position_ids"), plain.get("attention_mask"), spans, inside, shifts)
        if placed is None:
            if images is not None and why is None:
                why = _NO_END if bool(inside[:, -1].any()) else _NOT_PLACED
            return Seen(plain, images, [None] * len(ids), why_whole=why)
        if placed.positions is not None:  # with positions, the model does not read from what they follow
            plain = {name: value for name, value in plain.items() if name not in self._of_places}
            plain["position_ids"] = placed.positions
        if self._has_index and any(placed.shifts):
            why = _INDEXED
        stands = [*placed.beside, *types]  # what shapes each column of an image
        details = [
            [b"".join(_as_bytes(held, number, image) for held in stands) for image in of_row]
            for number, of_row in enumerate(spans)
        ]
        return Seen(plain, images, placed.shifts, details, why)

    def _take_types(self, plain: dict[str, Any], name: str, inside: Tensor) -> Tensor | None:
        """Take out token types that condition nothing outside of images, [R, T]; None: there are none.

        Types that are left are what the reader of arguments names as the reason for no reuse.
        """
        value = plain.get(name)
        if name not in self._text_types or not isinstance(value, Tensor) or value.dim() != 2:
            return None
        if len(value) not in (1, len(inside)):
            return None
        types = value.to("cpu", torch.int64).expand(len(inside), -1)
        is_set = types != 0
        if is_set.shape == inside.shape:
            is_set &= ~inside
        if is_set.any():
            return None
        del plain[name]
        return types


class _Placed(NamedTuple):
    """`_Placed` says where tokens stand."""

    positions: Tensor | None  # positions of one number; None: those passed are such already
    shifts: Sequence[int | None]  # of each row: how far its images have moved later positions; None: not known
    beside: Sequence[Tensor] = ()  # how far each number of a position is from where text would stand, [R, T] each


def _placed(
    positions: Any, mask: Any, spans: Sequence[Sequence[Image]], inside: Tensor, shifts: Sequence[int | None]
) -> _Placed | None:
    """Return where tokens stand; None where positions do not count up by one outside of images.

    Args:
        positions: positions passed, [R, T], [1, T] or [N, R, T]; the first of four numbers counts tokens.
        inside: columns that images fill, [R, T].
        shifts: how far images have moved the positions of rows that resume.
    """
    has_images, num_rows = any(spans), len(spans)
    if not isinstance(positions, Tensor):
        return _Placed(None, [None] * num_rows if has_images else shifts)
    known = [shift for shift in shifts if shift is not None]
    is_known, moved = len(known) == num_rows, torch.tensor(known, device=positions.device)[:, None]
    if positions.dim() == 2:
        return _Placed(positions - moved if is_known and any(known) else None, shifts)
    if not is_known or positions.dim() != 3 or positions.shape[0] not in (1, 3, 4):
        return None
    if positions.shape[1] not in (1, num_rows):
        return None
    if has_images:
        return _placed_images(positions.expand(-1, num_rows, -1), mask, inside)
    counted, rope = positions[:-3], positions[-3:]
    text = rope[-1] - moved
    is_text = (rope == rope[-1]).all() & (counted == text).all()
    return _Placed(text, shifts) if bool(is_text) else None


def _placed_images(positions: Tensor, mask: Any, inside: Tensor) -> _Placed | None:
    """Return what `_placed` does for a first forward of rows with images, and positions of [N, R, T]."""
    hidden = torch.zeros_like(inside)
    if isinstance(mask, Tensor) and mask.shape == inside.shape:
        hidden = mask.cpu() == 0
    elif mask is not None:
        return None
    pads, columns = (~hidden).int().argmax(dim=1, keepdim=True), torch.arange(inside.shape[1], device="cpu")
    counted, rope = positions[:-3].cpu(), positions[-3:].cpu()
    text = (columns - pads).clamp(min=0) + rope[0].gather(1, pads)
    moved, is_text = rope - text, ~inside & ~hidden
    goes_on = is_text[:, 1:] & is_text[:, :-1]
    is_one_number = (moved == moved[:1]).all(dim=0) | ~is_text
    is_counted = (counted == text) | hidden  # only masks use this number
    counts_on = (moved[0].diff(dim=1) == 0) | ~goes_on
    if inside[:, -1].any() or not (is_one_number.all() and is_counted.all() and counts_on.all()):
        return None
    return _Placed(text.to(positions.device), moved[0, :, -1].tolist(), [*moved])


def _as_bytes(numbers: Tensor, row: int, image: Image) -> bytes:
    """Return the numbers of an image's columns and of the text after it."""
    return numbers[row, image.start : image.stop + 1].numpy().tobytes()


def _is_read_by_place(model: Any, name: str) -> bool:
    """Return whether a model is passed token types for the whole sequence, also where only later tokens run.

    The model's own `prepare_inputs_for_generation` says so.
    """
    ids = torch.zeros((1, 8), dtype=torch.int64, device="cpu")
    given = {"is_first_iteration": True, "use_cache": True, name: torch.zeros_like(ids)}
    try:
        types = model.prepare_inputs_for_generation(ids[:, 4:], **given).get(name)
    except Exception:  # noqa: BLE001 (a model may raise anything)
        return False
    return isinstance(types, Tensor) and types.shape[-1] == 8
