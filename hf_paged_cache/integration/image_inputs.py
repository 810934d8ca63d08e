"""Reads images, token types, and how images move positions, from a forward's arguments.

All of this becomes a part of the images' names, or has no influence. Where it is not understood, the forward is
computed whole, and its call says why.
"""

import hashlib
import inspect
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin

from ..blocks.image_tokens import name_image
from ..call.request import ForwardRequest, RowInput
from ..model.placeholders import Placeholders
from ..model.support import cache_layers, has_index
from .forward_arguments import TOKEN_TYPES, RunningRows
from .prompt_images import ENCODED, Image, ImageReader, PromptImages

_NO_NAME = "an image at the beginning of a block has too few tokens for its digest, or ids are too large"
_NO_END = "the prompt ends with an image, so where the text after it stands is not known"
_NOT_PLACED = "positions beside the images do not count up by one"
_OTHER_IDS = "the ids that run are not those of the prompt"
_INDEXED = "layers weigh index keys by the positions of all columns, and images move these"
_RESUMES = "images are passed after rows that resume"
_PLAIN = ("input_ids", "attention_mask", "inputs_embeds", "kwargs", *TOKEN_TYPES)


class Seen(NamedTuple):
    """`Seen` holds what a forward's arguments say beside ids, mask and positions.

    Attributes:
        plain: the arguments without images, types of text, and positions of three numbers.
        images: images that begin with this forward.
        shifts: for each row, how far its images have moved the positions of the text after them; None: not known.
        details: for each row and each of its images, what else shapes the keys and values of the columns that the image
            fills: where the image stands, and the types of its tokens.
        why_whole: why nothing may be reused or kept; None: it may be.
    """

    plain: Mapping[str, Any]
    images: PromptImages | None = None
    shifts: Sequence[int | None] = ()
    details: Sequence[Sequence[bytes]] = ()
    why_whole: str | None = None

    def named(self, request: ForwardRequest, block_size: int) -> tuple[Sequence[RowInput], str | None]:
        """Return the request's rows with the names of their images; or as they are, and why they are computed whole."""
        given = request.rows
        if len(self.shifts) == len(given):
            given = tuple(row._replace(shift=shift) for row, shift in zip(given, self.shifts, strict=True))
        if self.images is None or self.why_whole is not None or request.bypass is not None:
            return given, self.why_whole
        if not self.images.fit(request):
            return given, _OTHER_IDS
        rows, num_rows = [], len(given)
        for number, row in enumerate(given):
            tokens = row.token_ids[:]
            for image, detail in zip(self.images.of_row(number, num_rows), self.details[number], strict=True):
                digest = hashlib.sha256(image.digest + detail).digest()
                start, stop = image.start - row.pad, image.stop - row.pad
                if start < 0 or stop >= len(tokens):
                    return given, _NO_END
                if not name_image(tokens, start, stop, digest, block_size):
                    return given, _NO_NAME
            rows.append(row._replace(token_ids=tokens))
        return rows, None


class ImageInputs:
    """`ImageInputs` reads what the forwards of one model are passed beside ids, mask and positions of one number.

    Args:
        model: model that runs the forwards; its encoders are held, the model is not.
        placeholders: placeholders of the model.
        text_types: names of token types that condition nothing where they are 0: see `model.trial`.

    Attributes:
        whole: names of arguments that keep all columns where only later tokens run.
    """

    def __init__(self, model: Any, placeholders: Placeholders, text_types: frozenset[str]) -> None:
        self._reader = ImageReader(model, placeholders)
        self._text_types = text_types
        self._is_plain = not placeholders and not text_types
        place = getattr(getattr(model, "base_model", model), "get_rope_index", None)
        self._of_places = {*inspect.signature(place).parameters} - {*_PLAIN} if place is not None else set()
        self._has_index = any(map(has_index, cache_layers(model)))
        self.whole = ("attention_mask", *_reads_types_by_place(model, text_types))

    @property
    def takes_images(self) -> bool:
        """True if the model takes images."""
        return not self._is_plain and bool(self._reader)

    def of_generate(self, model: Any, passed: Mapping[str, Any]) -> PromptImages | None:
        """Return the images that a `generate` is not to be passed: it would run towers before known images are found.

        The first forward is then passed what the towers make of the images that it needs. None: there are no images, or
        they are not understood, and the `generate` runs as it is.

        Args:
            passed: arguments of the `generate`, by name.
        """
        if not self._reader or type(model).generate is not GenerationMixin.generate or _is_cut(model, passed):
            return None
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
        plain, why = dict(arguments), None
        if images is None and self._reader:
            found = self._reader.read(arguments)
            images, why = (None, found) if isinstance(found, str) else (found, None)
        if images is not None:
            for name in (*images.arguments, ENCODED):
                plain.pop(name, None)
            if rows.num_columns:
                return Seen(plain, images, why_whole=_RESUMES)
        running = rows.rows
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return Seen(plain, images, why_whole=why)
        num_rows = len(ids)
        spans = [images.of_row(number, num_rows) if images is not None else [] for number in range(num_rows)]
        types = self._types(plain, spans)
        placed = _placed(plain.get("position_ids"), plain.get("attention_mask"), spans, [row.shift for row in running])
        if placed is None:
            unknown = [None] * num_rows
            if images is not None:
                why = why or (
                    _NO_END if any(of_row and of_row[-1].stop == ids.shape[1] for of_row in spans) else _NOT_PLACED
                )
            return Seen(plain, images, unknown, why_whole=why)
        positions, shifts, places = placed
        if positions is not None:
            plain["position_ids"] = positions
            plain = self._without_places(plain)
        if self._has_index and any(shifts):
            return Seen(plain, images, shifts, why_whole=_INDEXED)
        details = [
            [place + b"".join(held[number][at] for held in types) for at, place in enumerate(of_row)]
            for number, of_row in enumerate(places)
        ]
        return Seen(plain, images, shifts, details, why)

    def _without_places(self, plain: dict[str, Any]) -> dict[str, Any]:
        """Return arguments without those from which positions follow: with positions, the model does not read these."""
        return {name: value for name, value in plain.items() if name not in self._of_places}

    def _types(self, plain: dict[str, Any], spans: Sequence[Sequence[Image]]) -> list[list[list[bytes]]]:
        """Take out token types that condition nothing outside of images; return what each says of each row's images."""
        found = []
        for name in TOKEN_TYPES:
            value, num_rows = plain.get(name), len(spans)
            if (
                name not in self._text_types
                or not isinstance(value, Tensor)
                or value.dim() != 2
                or value.shape[0] not in (1, num_rows)
            ):
                continue
            inside = torch.zeros((num_rows, value.shape[1]), dtype=torch.bool, device="cpu")
            for number, of_row in enumerate(spans):
                for image in of_row:
                    inside[number, image.start : image.stop] = True
            held = value.cpu().expand(num_rows, -1)
            if (held != 0).logical_and(~inside).any():
                continue  # the reader of arguments names it as the reason for no reuse
            del plain[name]
            rows = held.to(torch.int64).tolist()
            found.append(
                [
                    [array("q", rows[number][image.start : image.stop]).tobytes() for image in of_row]
                    for number, of_row in enumerate(spans)
                ]
            )
        return found


def _placed(
    positions: Any, mask: Any, spans: Sequence[Sequence[Image]], shifts: Sequence[int | None]
) -> tuple[Tensor | None, Sequence[int | None], list[list[bytes]]] | None:
    """Return positions of one number, how far images move later positions, and where each image stands.

    The positions returned count up by one. None: those passed do not, outside of images.

    Args:
        positions: positions passed, [R, T], [1, T] or [N, R, T]; the first of four numbers counts tokens.
        shifts: how far images have moved the positions of rows that resume.
    """
    num_rows = len(spans)
    known = [shift for shift in shifts if shift is not None]
    nowhere = None, [*shifts] or [0] * num_rows, [[b""] * len(of_row) for of_row in spans]
    if not isinstance(positions, Tensor) and any(spans):
        return None, [None] * num_rows, nowhere[2]
    if not isinstance(positions, Tensor) or (positions.dim() == 2 and (not any(known) or len(known) < len(shifts))):
        return nowhere
    if len(known) < len(shifts):
        return None
    if positions.dim() == 2:
        return positions - torch.tensor(known, device=positions.device)[:, None], nowhere[1], nowhere[2]
    if positions.dim() != 3 or positions.shape[0] not in (1, 3, 4) or positions.shape[1] not in (1, num_rows):
        return None
    rope = positions[1:] if positions.shape[0] == 4 else positions
    counted = positions[0] if positions.shape[0] == 4 else None  # only masks use this number
    if not any(spans):
        text = rope[-1]
        if any(known):
            text = text - torch.tensor(known, device=text.device)[:, None]
        are_equal = (rope == rope[-1:]).all()
        if counted is not None:
            are_equal = are_equal & (counted == text).all()
        return (text, nowhere[1], nowhere[2]) if bool(are_equal) else None
    num_columns = positions.shape[2]
    pads = [0] * num_rows
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape == (num_rows, num_columns):
        pads = (mask != 0).int().argmax(dim=1).tolist()
    elif mask is not None:
        return None
    by_number, counts = rope.tolist(), None if counted is None else counted.tolist()
    plain, moved, places = [], [], []
    for number, (pad, of_row) in enumerate(zip(pads, spans, strict=True)):
        at = number if rope.shape[1] > 1 else 0
        found = _place([one[at] for one in by_number], pad, of_row)
        if found is None or (
            counts is not None and counts[at][pad:] != [*range(counts[at][pad], counts[at][pad] + num_columns - pad)]
        ):
            return None
        first, shift, of_images = found
        plain.append([max(0, column - pad) + first for column in range(num_columns)])
        moved.append(shift)
        places.append(of_images)
    return torch.tensor(plain, device=positions.device), moved, places


def _place(numbers: Sequence[Sequence[int]], pad: int, images: Sequence[Image]) -> tuple[int, int, list[bytes]] | None:
    """Return a row's first position, how far its images move later positions, and where each image stands.

    An image stands relative to the text before it. None: positions outside of images do not count up by one.

    Args:
        numbers: for each number of a position, its values in all columns.
    """
    first = at = numbers[0][pad]  # position of the next token of text
    column, places, num_columns = pad, [], len(numbers[0])
    bounds = [*((image.start, image.stop) for image in images), (num_columns, num_columns)]
    for start, stop in bounds:
        text = [*range(at, at + start - column)]
        if any([*one[column:start]] != text for one in numbers):
            return None
        at += start - column
        if start < stop:
            if stop >= num_columns:
                return None
            after = numbers[0][stop]
            held = [number - at for one in numbers for number in one[start:stop]]
            places.append(array("q", [*held, after - at]).tobytes())
            at, column = after, stop
    return first, at - first - (num_columns - pad), places


def _is_cut(model: Any, passed: Mapping[str, Any]) -> bool:
    """Return whether a `generate` runs its prompt in several forwards."""
    configs = (passed.get("generation_config"), model.generation_config)
    chunk = passed.get("prefill_chunk_size")
    return any(
        each is not None for each in (chunk, *(getattr(config, "prefill_chunk_size", None) for config in configs))
    )


def _reads_types_by_place(model: Any, names: Iterable[str]) -> set[str]:
    """Return the token types that a model is passed for the whole sequence, also where only later tokens run.

    The model's own `prepare_inputs_for_generation` says so.
    """
    found = set()
    ids = torch.zeros((1, 8), dtype=torch.int64, device="cpu")
    for name in names:
        try:
            prepared = model.prepare_inputs_for_generation(
                ids[:, 4:], is_first_iteration=True, use_cache=True, **{name: torch.zeros_like(ids)}
            )
        except Exception:  # noqa: BLE001 (a model may raise anything)
            continue
        if isinstance(prepared.get(name), Tensor) and prepared[name].shape[-1] == 8:
            found.add(name)
    return found
