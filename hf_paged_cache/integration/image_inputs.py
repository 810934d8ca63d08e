"""What fills the placeholders of a prompt: which entries of `pixel_values` belong to which columns, and which of them still have to run.

Works for models whose forward takes `mm_encoder_outputs`: transformers then runs the tower by `get_image_features`, or `get_video_features`, with
the arguments that these have, and row `i` of the features fills placeholder `i`. Which entries fill which columns follows from the
shapes and grids passed; where they do not add up, the prompt is computed whole. Nothing here knows a model's name.
"""

import hashlib
import inspect
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin

from ..blocks.image_tokens import name_image
from ..blocks.tokens import TokenIds
from ..call.rows import Rows
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..model.placeholders import Placeholders, kind_of
from ..model.support import cache_layers, has_index
from .forward_arguments import TOKEN_TYPES

ENCODED = "mm_encoder_outputs"
_KINDS = ("image", "video")
_NO_NAME = "an image at the beginning of a block has too few tokens for its digest, or ids are too large"
_NO_END = "the prompt ends with an image, so where the text after it stands is not known"
_NOT_PLACED = "positions beside the images do not count up by one"
_OTHER_IDS = "the ids that run are not those of the prompt"
_INDEXED = "layers weigh index keys by the positions of all columns, and images move these"
_RESUMES = "images are passed after rows that resume"


class Image(NamedTuple):
    """What fills columns `[start, stop)` of a row, as a whole.

    Attributes:
        entries: kind -> the numbers of what fills them, in order.
        digest: of those.
    """

    start: int
    stop: int
    entries: Mapping[str, Sequence[int]]
    digest: bytes


class _Content(NamedTuple):
    """What is passed of one kind.

    Attributes:
        arguments: of the encoder, as they were passed.
        bounds: name -> where each entry begins in that tensor, and where the last ends.
        counts: of each entry, the placeholders that it fills; empty where that is not known.
        is_nested: the tensors' first two dimensions count entries.
    """

    arguments: Mapping[str, Any]
    bounds: Mapping[str, Sequence[int]]
    counts: Sequence[int] = ()
    is_nested: bool = False

    def part(self, name: str) -> Tensor:
        value: Tensor = self.arguments[name]
        return value.flatten(0, 1) if self.is_nested else value

    def chosen(self, entries: Sequence[int], num_entries: int) -> dict[str, Any]:
        """The encoder's arguments for some entries."""
        if [*entries] == [*range(num_entries)]:
            return dict(self.arguments)
        chosen = dict(self.arguments)
        for name, bounds in self.bounds.items():
            part = self.part(name)
            some = torch.cat([part[bounds[entry] : bounds[entry + 1]] for entry in entries])
            chosen[name] = some[None] if self.is_nested else some
        return chosen


class PromptImages:
    """The images of a prompt's rows.

    Attributes:
        rows: of each row of the prompt, its images from left to right.
        arguments: names of what was passed, for the encoders.
        pixels: those of them without which `generate` runs no tower.
    """

    def __init__(
        self,
        encoders: Mapping[str, Any],
        expand: Callable[..., Any],
        pixels: Collection[str],
        contents: Mapping[str, _Content],
        rows: list[list[Image]],
        ids: list[TokenIds],
    ) -> None:
        self.rows = rows
        self.pixels = pixels
        self.arguments = {name for content in contents.values() for name in content.arguments}
        self._encoders, self._expand = encoders, expand
        self._contents = contents
        self._ids = ids

    def of_row(self, number: int, num_rows: int) -> list[Image]:
        """The images of a row of a forward that runs each prompt several times, as beams do."""
        return self.rows[number * len(self.rows) // num_rows]

    def fit(self, request: ForwardRequest) -> bool:
        """Whether a first forward's rows begin with the prompt's."""
        num_rows, num_prompts = len(request.rows), len(self.rows)
        return num_rows % num_prompts == 0 and all(
            row.token_ids[: len(ids) - row.pad] == ids[row.pad :]
            for number, row in enumerate(request.rows)
            for ids in (self._ids[number * num_prompts // num_rows],)
        )

    def encode(self, numbers: Sequence[int], num_rows: int, start: int = 0) -> dict[str, Any]:
        """What the towers make of the images from a column on, for rows of a forward; the towers do not run for any other.

        Args:
            numbers: the rows that run, in order.
            num_rows: of the forward as it was passed.
            start: the first column that runs, of those that were passed.
        """
        copies = num_rows // len(self.rows)
        if copies > 1 and start == 0 and [*numbers] == [*range(num_rows)]:  # each image runs once, as in `generate`
            ids = torch.tensor([[*row] for row in self._ids])
            expanded: dict[str, Any] = self._expand(ids, self.encode(range(len(self.rows)), len(self.rows)), copies)
            return expanded
        wanted: dict[str, list[int]] = {}
        for number in numbers:
            for image in self.of_row(number, num_rows):
                for kind, entries in image.entries.items() if image.start >= start else ():
                    wanted.setdefault(kind, []).extend(entries)
        return {
            kind: self._encoders[kind](
                **self._contents[kind].chosen(entries, self._num_entries(kind)), return_dict=True
            )
            for kind, entries in wanted.items()
        }

    def _num_entries(self, kind: str) -> int:
        return len(next(iter(self._contents[kind].bounds.values()))) - 1


class Seen(NamedTuple):
    """A forward's arguments, as far as they are more than ids, mask and positions.

    Attributes:
        plain: the arguments without images, types of text, and positions of three numbers.
        images: that begin with this forward.
        shifts: of each row, how far its images have moved the positions of the text after them; None: not known.
        details: of each row and each of its images, what else shapes what it fills: where it stands, and types of its tokens.
        why_whole: why nothing may be reused or kept.
    """

    plain: Mapping[str, Any]
    images: PromptImages | None = None
    shifts: Sequence[int | None] = ()
    details: Sequence[Sequence[bytes]] = ()
    why_whole: str | None = None

    def named(self, request: ForwardRequest, block_size: int) -> tuple[Sequence[RowInput], str | None]:
        """The request's rows with the names of their images; or as they are, and why they are computed whole."""
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
    """Reads what the forwards of one model are passed beside ids, mask and positions of one number.

    Args:
        model: is not held; its encoders are.
        placeholders: the model's.
        text_types: names of token types that condition nothing where they are 0: see `model.trial`.
    """

    def __init__(self, model: Any, placeholders: Placeholders, text_types: frozenset[str]) -> None:
        parameters = inspect.signature(model.forward).parameters
        base = getattr(model, "base_model", model)
        found = {
            kind: getattr(base, f"get_{kind}_features", None)
            for kind in _KINDS
            if ENCODED in parameters and hasattr(model, "_expand_multimodal_outputs")
        }
        self._encoders = {kind: encoder for kind, encoder in found.items() if encoder is not None}
        self._expand: Any = getattr(model, "_expand_multimodal_outputs", None)
        self._names = {
            kind: [name for name in inspect.signature(encoder).parameters if name not in ("kwargs", "return_dict")]
            for kind, encoder in self._encoders.items()
        }
        self._pixels = {kind: [name for name in names if kind_of(name) == kind] for kind, names in self._names.items()}
        self._tokens = {
            kind: [token for token, kinds in placeholders.kinds.items() if kinds == {kind}] for kind in self._encoders
        }
        self._text_types = text_types
        self._is_plain = not placeholders and not text_types
        self._has_index = any(map(has_index, cache_layers(model)))
        self.whole = ("attention_mask", *_reads_types_by_place(model, text_types))

    def read(self, arguments: Mapping[str, Any]) -> PromptImages | str | None:
        """The images of a prompt, of arguments of `generate` or of a forward; or why it must run whole; None without any.

        Cost: SHA-256 over the pixels; one wait for each device.
        """
        ids = arguments.get("input_ids")
        passed = {
            kind: {name: arguments[name] for name in names if arguments.get(name) is not None}
            for kind, names in self._names.items()
            if any(arguments.get(name) is not None for name in self._pixels[kind])
        }
        if not passed or arguments.get(ENCODED) or not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return None
        pixels = {name for kind in passed for name in self._pixels[kind]}
        rows = [array("q", row) for row in ids.tolist()]
        runs = {kind: _runs(rows, self._tokens[kind]) for kind in passed}
        found = self._by_run(
            {kind: _content(given, runs[kind], len(rows)) for kind, given in passed.items()}, runs, len(rows)
        )
        found = found or self._by_row({kind: _whole(given) for kind, given in passed.items()}, runs, len(rows), pixels)
        if found is None:
            return "entries of pixel_values and placeholders do not add up"
        return PromptImages(self._encoders, self._expand, pixels, *found, rows)

    def of_generate(self, model: Any, passed: Mapping[str, Any]) -> PromptImages | None:
        """The images that a `generate` is not to be passed, for it would run the towers before anybody can say which of them are known.

        Its first forward is then passed what they make of those that it needs. None where there are none, or they are not
        understood: then it runs as it is.

        Args:
            passed: its arguments, by name.
        """
        if not self._encoders or type(model).generate is not GenerationMixin.generate or _is_cut(model, passed):
            return None
        images = self.read(passed)
        return images if isinstance(images, PromptImages) else None

    def see(self, arguments: Mapping[str, Any], rows: Rows, images: PromptImages | None) -> Seen:
        """What a forward is passed.

        Args:
            rows: those that resume; none for a first forward.
            images: that `generate` was passed; None: look for them among the arguments.
        """
        if self._is_plain:
            return Seen(arguments)
        plain, why = dict(arguments), None
        if images is None and self._encoders:
            found = self.read(arguments)
            images, why = (None, found) if isinstance(found, str) else (found, None)
        if images is not None:
            for name in (*images.arguments, ENCODED):
                plain.pop(name, None)
            if rows.num_columns:
                return Seen(plain, images, why_whole=_RESUMES)
        running = rows.in_batch()
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return Seen(plain, images, why_whole=why)
        num_rows = len(ids)
        spans = [images.of_row(number, num_rows) if images is not None else [] for number in range(num_rows)]
        types = self._types(plain, spans)
        placed = _placed(plain.get("position_ids"), plain.get("attention_mask"), spans, [row.shift for row in running])
        if placed is None:
            unknown = [None] * num_rows
            return Seen(plain, images, unknown, why_whole=why or (_NOT_PLACED if images is not None else None))
        positions, shifts, places = placed
        if positions is not None:
            plain["position_ids"] = positions
        if self._has_index and any(shifts):
            return Seen(plain, images, shifts, why_whole=_INDEXED)
        details = [
            [place + b"".join(held[number][at] for held in types) for at, place in enumerate(of_row)]
            for number, of_row in enumerate(places)
        ]
        return Seen(plain, images, shifts, details, why)

    def see_step(self, arguments: Mapping[str, Any], rows: Rows) -> Mapping[str, Any] | None:
        """The arguments of a decode step without types of text and with positions of one number; None where it must be looked at."""
        if self._is_plain:
            return arguments
        positions, plain = arguments.get("position_ids"), dict(arguments)
        shifts = [row.shift for row in rows.in_batch()]
        for name in self._text_types & plain.keys():
            value = plain[name]
            if isinstance(value, Tensor) and value.device.type == "cpu" and not value.any():
                del plain[name]
        if isinstance(positions, Tensor) and (positions.dim() == 3 or any(shifts)):
            if positions.device.type != "cpu":
                return None  # nothing is held that is more than one number a token
            placed = _placed(positions, None, [[] for _ in shifts], shifts)
            if placed is None or placed[0] is None:
                return None
            plain["position_ids"] = placed[0]
        return plain

    def _types(self, plain: dict[str, Any], spans: Sequence[Sequence[Image]]) -> list[list[list[bytes]]]:
        """Take token types out that condition nothing outside of images; of each, what it says of each row's images."""
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
            inside = torch.zeros((num_rows, value.shape[1]), dtype=torch.bool)
            for number, of_row in enumerate(spans):
                for image in of_row:
                    inside[number, image.start : image.stop] = True
            held = value.cpu().expand(num_rows, -1)
            if (held != 0).logical_and(~inside).any():
                continue  # said by name
            del plain[name]
            rows = held.to(torch.int64).tolist()
            found.append(
                [
                    [array("q", rows[number][image.start : image.stop]).tobytes() for image in of_row]
                    for number, of_row in enumerate(spans)
                ]
            )
        return found

    def _by_run(
        self, contents: Mapping[str, _Content | None], runs: Mapping[str, list[tuple[int, int, int]]], num_rows: int
    ) -> tuple[Mapping[str, _Content], list[list[Image]]] | None:
        """The images of each row, a run of placeholders each; None where entries do not end with runs."""
        rows: list[list[Image]] = [[] for _ in range(num_rows)]
        known = {}
        for kind, content in contents.items():
            if content is None:
                return None
            known[kind], entry, ends = content, 0, [*accumulate(content.counts)]
            for row, start, stop in runs[kind]:
                first, wanted = entry, (ends[entry - 1] if entry else 0) + stop - start
                while entry < len(ends) and ends[entry] <= wanted:
                    entry += 1
                if not entry or ends[entry - 1] != wanted or entry == first:
                    return None
                digests = b"".join(self._digest(content, number) for number in range(first, entry))
                entries = {kind: range(first, entry)}
                rows[row].append(Image(start, stop, entries, hashlib.sha256(digests).digest()))
            if entry != len(ends):
                return None
        return known, [sorted(row) for row in rows]

    def _by_row(
        self,
        contents: Mapping[str, _Content | None],
        runs: Mapping[str, list[tuple[int, int, int]]],
        num_rows: int,
        pixels: Collection[str],
    ) -> tuple[Mapping[str, _Content], list[list[Image]]] | None:
        """All images of a row as one; None where it is not known which entries are a row's.

        Of several rows, each has an entry of its own, which is zeros where it has no image: with fewer entries in one row, another would
        have more than one.
        """
        known, held = {}, [set[str]() for _ in range(num_rows)]
        for kind, content in contents.items():
            if content is None or not runs[kind]:
                return None
            for row, _, _ in runs[kind]:
                held[row].add(kind)
            known[kind] = content
            if num_rows > 1:
                if any(bounds[-1] != num_rows for bounds in content.bounds.values()):
                    return None
                known[kind] = content._replace(bounds={name: range(num_rows + 1) for name in content.bounds})
                drawn = [content.arguments[name] for name in content.bounds if name in pixels]
                if any(bool(value[row].any()) for row in range(num_rows) if kind not in held[row] for value in drawn):
                    return None
        rows: list[list[Image]] = [[] for _ in range(num_rows)]
        for number, kinds in enumerate(held):
            spans = [(start, stop) for kind in kinds for row, start, stop in runs[kind] if row == number]
            if spans:
                entries = {kind: [number] for kind in known if kind in kinds}
                digests = b"".join(self._digest(known[kind], number) for kind in entries)
                start, stop = min(spans)[0], max(stop for _, stop in spans)
                rows[number].append(Image(start, stop, entries, hashlib.sha256(digests).digest()))
        return known, rows

    def _digest(self, content: _Content, entry: int) -> bytes:
        """Of an entry, in all tensors, and of what is said of all entries."""
        options = {name: value for name, value in content.arguments.items() if name not in content.bounds}
        parts = [repr(sorted(options.items())).encode()]
        for name, bounds in sorted(content.bounds.items()):
            parts += [
                name.encode(),
                _digest_of(content.part(name)[bounds[entry] : bounds[entry + 1]]),
            ]
        return hashlib.sha256(b"\0".join(parts)).digest()


def _digest_of(tensor: Tensor) -> bytes:
    """Of dtype, shape and values."""
    held = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{held.dtype} {tuple(held.shape)} ".encode())
    digest.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _runs(rows: Sequence[TokenIds], tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(row, first column, column after the last) of each run of these tokens."""
    found, wanted = [], {*tokens}
    for number, row in enumerate(rows):
        column = 0
        for is_placeholder, run in groupby(row, key=wanted.__contains__):
            stop = column + sum(1 for _ in run)
            if is_placeholder:
                found.append((number, column, stop))
            column = stop
    return found


def _whole(given: Mapping[str, Any]) -> _Content | None:
    """All that is passed as one entry; None where something has no rows."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if not tensors or any(
        isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value) for value in given.values()
    ):
        return None
    if any(not value.dim() for value in tensors.values()):
        return None
    return _Content(given, {name: (0, len(value)) for name, value in tensors.items()})


def _content(given: Mapping[str, Any], runs: Sequence[tuple[int, int, int]], num_rows: int) -> _Content | None:
    """What is passed of a kind, by entries that follow from shapes and grids; None where they do not."""
    whole = _whole(given)
    if whole is None or not runs:
        return None
    tensors = {name: given[name] for name in whole.bounds}
    main = next((value for name, value in tensors.items() if "pixel_values" in name), None)
    if main is None:
        return None
    lengths, total = [stop - start for _, start, stop in runs], sum(stop - start for _, start, stop in runs)
    grid = next((value for name, value in tensors.items() if "grid" in name and value.dim() == 2), None)
    if grid is not None:
        sizes = grid.prod(dim=-1).tolist()
        per_token, rest = divmod(sum(sizes), total)
        if rest or not per_token or any(size % per_token for size in sizes):
            return None
        packed, single = [0, *accumulate(sizes)], [*range(len(sizes) + 1)]
        bounds = {}
        for name, value in tensors.items():
            if len(value) == len(sizes):
                bounds[name] = single
            elif len(value) == packed[-1] and name != "grid":
                bounds[name] = packed
            else:
                return None
        return _Content(given, bounds, [size // per_token for size in sizes])
    nested = main.dim() == 5 and len(main) == num_rows
    is_nested = nested and all(value.dim() >= 3 and value.shape[:2] == main.shape[:2] for value in tensors.values())
    if is_nested and not bool((main != 0).flatten(2).any(dim=2).all()):
        return None  # padding among them, which the model leaves out
    num_entries = main.shape[0] * main.shape[1] if is_nested else len(main)
    if any(
        (len(value) if not is_nested else value.shape[0] * value.shape[1]) != num_entries for value in tensors.values()
    ):
        return None
    bounds = {name: [*range(num_entries + 1)] for name in tensors}
    beside = [value.flatten(0, 1) if is_nested else value for value in tensors.values() if value is not main]
    are_alike = all(bool((value == value[:1]).all()) for value in beside)
    if len(runs) == num_entries and (not are_alike or len({*lengths}) == 1):
        return _Content(given, bounds, lengths, is_nested)
    if are_alike and total % num_entries == 0:
        return _Content(given, bounds, [total // num_entries] * num_entries, is_nested)
    return None


def _placed(
    positions: Any, mask: Any, spans: Sequence[Sequence[Image]], shifts: Sequence[int | None]
) -> tuple[Tensor | None, Sequence[int | None], list[list[bytes]]] | None:
    """Positions of one number that count up by one where those passed do, but for images; how far these move what follows; and where each
    image stands. None where they do not.

    Args:
        positions: [R, T], [1, T], or [N, R, T]: of four numbers, the first counts tokens.
        shifts: of rows that resume.
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
    counted = positions[0] if positions.shape[0] == 4 else None  # masks alone look at it
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
    """Of a row: its first position, how far its images move what follows, and where each image stands after the text before it.

    Args:
        numbers: of each number of a position, all columns.
    """
    first = at = numbers[0][pad]  # where the next token of text stands
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
    """Whether a `generate` runs its prompt in several forwards."""
    configs = (passed.get("generation_config"), model.generation_config)
    chunk = passed.get("prefill_chunk_size")
    return any(
        each is not None for each in (chunk, *(getattr(config, "prefill_chunk_size", None) for config in configs))
    )


def _reads_types_by_place(model: Any, names: Iterable[str]) -> set[str]:
    """Token types that the model is passed from the beginning of the sequence on, also where only later tokens run: it says so itself."""
    found = set()
    ids = torch.zeros((1, 8), dtype=torch.int64)
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
