"""Finds the images of a prompt: which entries of what is passed fill which columns, and what a tower still has to run.

An image, a video or a sound takes the places of tokens of one id, its *placeholders*: their keys and values follow from
its content, which ids do not show. Both are found by structure: by the names that configs have for those ids, and by
the arguments of the model's forward.

Works for models whose forward takes `mm_encoder_outputs`. transformers then runs the tower by `get_image_features` or
`get_video_features`, and row `i` of the features fills placeholder `i`. Which entries fill which columns follows from
the shapes and grids passed. Whatever else a forward is passed of images, their token types and how they move positions,
becomes a part of their names. What is not understood is computed whole, and its call says why.
"""

import hashlib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..blocks.image_tokens import name_image
from ..errors import CacheArgumentError
from ..model.layers import cache_layers, has_index
from ..model.trial import text_types
from ..rows.request import ForwardRequest, RowInput
from ..rows.rows import Rows
from .forward_arguments import TOKEN_TYPES

# Kind -> parts of the names of arguments that bring its content. A name is of the first kind whose part is in it.
_CONTENT = {
    "video": ("pixel_values_videos", "video_features", "video_embeds"),
    "image": ("pixel_values", "image_features", "image_embeds", "image_patches", "image_hidden_states"),
    "audio": ("input_features", "input_values", "audio_features", "audio_embeds", "audio_input_ids", "audio_values"),
}
_BESIDE_CONTENT = ("_mask", "_cutoffs", "_position_ids")  # ends of the names of arguments that say how content lies
_THINGS = {"image": "an image", "video": "a video", "audio": "a sound"}
_ENDS = ("_token_id", "_token_index")  # ends of the names that configs have for a placeholder, after its kind
_ENCODED = "mm_encoder_outputs"
_CONTENT_OF_ALL = ("inputs_embeds", _ENCODED)
_NO_NAME = "an image at the beginning of a block has too few tokens for its digest, or ids are too large"
_NO_END = "the prompt ends with an image, so where the text after it stands is not known"
_NOT_PLACED = "positions beside the images do not count up by one"
_PLAIN = ("input_ids", "attention_mask", "inputs_embeds", "kwargs", *TOKEN_TYPES)
_Run = tuple[int, int, int]  # placeholders side by side: row, first column, column after the last one


class Image(NamedTuple):
    """`Image` is what fills the columns `[start, stop)` of a row, as a whole: some entries of one kind."""

    start: int
    stop: int
    kind: str
    entries: Sequence[int]
    digest: bytes


class _Content(NamedTuple):
    """`_Content` is what is passed of one kind, cut into entries."""

    passed: Mapping[str, Any]  # arguments of the encoder
    entries: Sequence[Mapping[str, Tensor]]  # each entry's part of the tensors among these
    by_run: Sequence[range]  # numbers of the entries that fill each run of placeholders
    is_nested: bool  # the first two dimensions of what was passed count entries

    def of(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        """Return the encoder's arguments for some entries."""
        if [*numbers] == [*range(len(self.entries))]:
            return self.passed
        chosen = {name: torch.cat([self.entries[number][name] for number in numbers]) for name in self.entries[0]}
        if self.is_nested:
            chosen = {name: value[None] for name, value in chosen.items()}
        return {**self.passed, **chosen}

    def digest(self, numbers: Sequence[int]) -> bytes:
        """Return the digest of some entries, in all tensors, and of the options of all entries."""
        options = {name: value for name, value in self.passed.items() if name not in self.entries[0]}
        digest = hashlib.sha256(repr(sorted(options.items())).encode() + b"\0")
        for number in numbers:
            for name, value in sorted(self.entries[number].items()):
                held = value.detach().cpu().contiguous()
                digest.update(f"{name} {held.dtype} {tuple(held.shape)} ".encode())
                digest.update(held.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()


class PromptImages(NamedTuple):
    """`PromptImages` holds the images of a prompt's rows."""

    model: Any
    pixels: Collection[str]  # names of the arguments without which `generate` runs no tower
    contents: Mapping[str, _Content]  # by kind
    rows: Sequence[Sequence[Image]]
    ids: Tensor  # of the prompt

    def is_argument(self, name: str) -> bool:
        """Return whether an argument is one of the encoders' that were passed."""
        return any(name in content.passed for content in self.contents.values())

    def of_row(self, number: int, num_rows: int) -> Sequence[Image]:
        """Return the images of a row of a forward that may run each prompt several times, as beams do."""
        return self.rows[number * len(self.rows) // num_rows]

    def fit(self, ids: Tensor) -> bool:
        """Return whether the rows of a first forward begin with those of the prompt."""
        copies, rest = divmod(len(ids), len(self.ids))
        prompts = self.ids.to(ids).repeat_interleave(copies, dim=0)
        return not rest and torch.equal(ids[:, : prompts.shape[1]], prompts)

    def encoded(
        self, arguments: Mapping[str, Any], numbers: Sequence[int], num_rows: int, start: int = 0
    ) -> dict[str, Any]:
        """Return a forward's arguments with what the towers make of the images from a column on in place of these.

        The rows `numbers` run, of `num_rows` that were passed. Where rows with the same images stand side by side, in
        groups of equal size, their images run once.
        """
        wanted = [[image for image in self.of_row(number, num_rows) if image.start >= start] for number in numbers]
        digests = [[image.digest for image in images] for images in wanted]
        copies, made = math.gcd(*(len([*run]) for _, run in groupby(digests))), {}
        base = getattr(self.model, "base_model", self.model)
        for kind, content in self.contents.items():
            images = [image for of_row in wanted[::copies] for image in of_row if image.kind == kind]
            if images:
                entries = [entry for image in images for entry in image.entries]
                made[kind] = getattr(base, f"get_{kind}_features")(**content.of(entries), return_dict=True)
        if made and copies > 1:
            prompts = [number * len(self.ids) // num_rows for number in numbers[::copies]]
            ids = self.ids[prompts, start:].cpu()
            made = self.model._expand_multimodal_outputs(ids, made, expand_size=copies)
        plain = {name: value for name, value in arguments.items() if name != _ENCODED and not self.is_argument(name)}
        return {**plain, _ENCODED: made} if made else plain


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
            tokens, images = row.token_ids[:], self.images.of_row(number, len(given))
            for image, detail in zip(images, self.details[number], strict=True):
                start, stop = image.start - row.pad, image.stop - row.pad
                if start < 0 or stop >= len(tokens):
                    return given, _NO_END
                if not name_image(tokens, start, stop, hashlib.sha256(image.digest + detail).digest(), block_size):
                    return given, _NO_NAME
            rows.append(row._replace(token_ids=tokens, holds_images=bool(images)))
        return rows, None


class ImageInputs:
    """`ImageInputs` reads what calls of one model are passed beside ids, mask and positions of one number."""

    def __init__(self, model: Any) -> None:
        self._model, self._names = model, dict[str, list[str]]()  # kind -> encoder's arguments
        base = getattr(model, "base_model", model)
        arguments = inspect.signature(model.forward).parameters
        self._content = {name: kind for name in arguments if (kind := _kind_of(name)) is not None}
        # token id -> kinds of content that it may stand for
        self.kinds = _placeholders_of(model.config) if self._content else {}
        self._text_types = text_types(model, TOKEN_TYPES)
        takes_features = _ENCODED in arguments and hasattr(model, "_expand_multimodal_outputs")
        for kind in ("image", "video") if takes_features else ():
            if (encoder := getattr(base, f"get_{kind}_features", None)) is not None:
                parameters = inspect.signature(encoder).parameters
                self._names[kind] = [name for name in parameters if name not in ("kwargs", "return_dict")]
        # plain: no forward can be passed anything that is read here
        self.takes_images, self.is_plain = bool(self._names), not self.kinds and not self._text_types
        place = getattr(base, "get_rope_index", None)
        self._of_places = {*inspect.signature(place).parameters} - {*_PLAIN} if place is not None else set()
        self._has_index = any(map(has_index, cache_layers(model)))
        # names of arguments that keep all columns where only later tokens run
        self.whole = ("attention_mask", *(name for name in self._text_types if _is_read_by_place(model, name)))

    def require_filled(self, arguments: Mapping[str, Any], before: int) -> None:
        """Refuse ids, after `before` columns, with placeholders where nothing is passed that could fill any.

        Cost: nothing where something is passed, or for a model without placeholders; else one wait for the ids' device.
        """
        ids = arguments.get("input_ids") if self.kinds else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_meta:
            return
        passed = [name for name, value in arguments.items() if value is not None]
        if any(_kind_of(name) is not None or name in _CONTENT_OF_ALL for name in passed):
            return
        if before and ids.shape[1] == 1:  # a model may generate the id of a placeholder
            return
        found = torch.isin(ids, torch.tensor([*self.kinds], dtype=ids.dtype, device=ids.device)).nonzero().tolist()
        if not found:
            return
        number, column = found[0]
        token = int(ids[number, column])
        own = [name for name, kind in self._content.items() if kind in self.kinds[token]]
        of_row = "" if len(ids) == 1 else f" of row {number}"
        raise CacheArgumentError(
            f"token {token} at position {before + column}{of_row} is the placeholder of {self._thing(token)}, and "
            f"nothing was passed that fills it: pass {' or '.join(own or self._content)}, or call the model without "
            "this cache"
        )

    def why_no_text(self, tokens: Sequence[int]) -> str:
        """Complete the sentence "the prompt ..." where it holds a placeholder; "" where it does not."""
        for position, token in enumerate(tokens if self.kinds else ()):
            if token in self.kinds:
                return (
                    f"has token {token} at position {position}, the placeholder of {self._thing(token)}, whose content "
                    "cannot be passed here; give text without it"
                )
        return ""

    def _thing(self, token: int) -> str:
        return " or ".join(_THINGS[kind] for kind in sorted(self.kinds[token]))

    def read(self, arguments: Mapping[str, Any]) -> PromptImages | str | None:
        """Read the images of a prompt from arguments of `generate` or of a forward; None: there are none.

        A text says why the prompt must be computed whole.  Cost: SHA-256 over the pixels.
        """
        ids, passed, contents, pixels = arguments.get("input_ids"), {}, {}, set[str]()
        for kind, names in self._names.items():
            given = {name: arguments[name] for name in names if arguments.get(name) is not None}
            if main := {name for name in given if _kind_of(name) == kind}:
                passed[kind] = given
                pixels |= main
        if not passed or arguments.get(_ENCODED) or not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return None
        rows: list[list[Image]] = [[] for _ in ids]
        for kind, given in passed.items():
            runs = _runs(ids.tolist(), {token for token, kinds in self.kinds.items() if kinds == {kind}})
            content = _cut(given, runs, len(ids))
            if content is None:
                return "entries of pixel_values and placeholders do not add up"
            contents[kind] = content
            for (row, start, stop), numbers in zip(runs, content.by_run, strict=True):
                rows[row].append(Image(start, stop, kind, numbers, content.digest(numbers)))
        return PromptImages(self._model, pixels, contents, [*map(sorted, rows)], ids)

    def see(self, arguments: Mapping[str, Any], rows: Rows) -> Seen:
        """Read what a forward of rows is passed: images that `generate` was passed, or that are among the arguments."""
        found = rows.state.images or self.read(arguments)
        images, why = (None, found) if isinstance(found, str) else (found, None)
        plain = {name: value for name, value in arguments.items() if images is None or not images.is_argument(name)}
        if images is not None and rows.n:
            return Seen(plain, images, why_whole="images are passed after rows that resume")
        ids = arguments.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            return Seen(plain, images, why_whole=why)
        if images is not None and not images.fit(ids):
            why = "the ids that run are not those of the prompt"
            return Seen(plain, images, [None] * len(ids), why_whole=why)
        spans = [images.of_row(number, len(ids)) if images is not None else () for number in range(len(ids))]
        inside = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")  # columns that images fill
        for number, of_row in enumerate(spans):
            for image in of_row:
                inside[number, image.start : image.stop] = True
        types = [held for name in TOKEN_TYPES if (held := self._take_types(plain, name, inside)) is not None]
        shifts: Sequence[int | None] = [prompt.shift for prompt in rows.prompts] or [0] * len(ids)
        placed = _placed(plain.get("position_ids"), plain.get("attention_mask"), inside, shifts)
        if placed is None:
            if images is not None and why is None:
                why = _NO_END if bool(inside[:, -1].any()) else _NOT_PLACED
            return Seen(plain, images, [None] * len(ids), why_whole=why)
        positions, shifts, beside = placed
        if positions is not None:  # with positions, the model does not read from what they follow
            plain = {name: value for name, value in plain.items() if name not in self._of_places}
            plain["position_ids"] = positions
        if self._has_index and any(shifts):
            why = "layers weigh index keys by the positions of all columns, and images move these"
        stands = [*beside, *types]  # what shapes each column of an image, and the text after it
        details: list[list[bytes]] = [[] for _ in spans]
        for number, of_row in enumerate(spans):
            for image in of_row:
                parts = [held[number, image.start : image.stop + 1].numpy().tobytes() for held in stands]
                details[number].append(b"".join(parts))
        return Seen(plain, images, shifts, details, why)

    def _take_types(self, plain: dict[str, Any], name: str, inside: Tensor) -> Tensor | None:
        """Take out token types that condition nothing outside of images, [R, T]; None: there are none."""
        value = plain.get(name)
        if name not in self._text_types or not isinstance(value, Tensor) or value.dim() != 2:
            return None
        if len(value) not in (1, len(inside)):
            return None
        types = value.to("cpu", torch.int64).expand(len(inside), -1)
        is_set = (types != 0) & ~inside if types.shape == inside.shape else types != 0
        if is_set.any():
            return None
        del plain[name]
        return types


def _kind_of(name: str) -> str | None:
    """Return the kind of content that an argument brings, by the argument's name; None: it brings none."""
    if name.endswith(_BESIDE_CONTENT):
        return None
    return next((kind for kind, parts in _CONTENT.items() if any(part in name for part in parts)), None)


def _placeholders_of(config: PreTrainedConfig) -> dict[int, frozenset[str]]:
    """Return the placeholders that a config and the configs nested in it name, and the kinds of their content."""
    kinds: dict[int, frozenset[str]] = {}
    for kind, end in product(_CONTENT, _ENDS):
        token = getattr(config, f"{kind}{end}", None)
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            kinds[token] = kinds.get(token, frozenset()) | {kind}
    for nested in vars(config).values():
        if isinstance(nested, PreTrainedConfig):
            for token, more in _placeholders_of(nested).items():
                kinds[token] = kinds.get(token, frozenset()) | more
    return kinds


def _runs(rows: Sequence[Sequence[int]], tokens: Collection[int]) -> list[_Run]:
    """Return each run of these tokens."""
    found = []
    for number, row in enumerate(rows):
        column = 0
        for is_placeholder, run in groupby(row, key=tokens.__contains__):
            stop = column + sum(1 for _ in run)
            if is_placeholder:
                found.append((number, column, stop))
            column = stop
    return found


def _cut(given: Mapping[str, Any], runs: Sequence[_Run], num_rows: int) -> _Content | None:
    """Cut what is passed of a kind into entries, by shapes and grids; None where they do not tell."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    in_lists = [each for value in given.values() if isinstance(value, list | tuple) for each in value]
    main = next((name for name in tensors if "pixel_values" in name), None)
    if main is None or not runs or any(isinstance(each, Tensor) for each in in_lists):
        return None
    shape = tensors[main].shape
    grid = next((each for name, each in tensors.items() if "grid" in name and each.dim() == 2), None)
    is_nested = main == "pixel_values" and len(shape) == 5 and shape[0] == num_rows and grid is None
    is_nested = is_nested and all(each.dim() > 2 and each.shape[:2] == shape[:2] for each in tensors.values())
    if is_nested:
        tensors = {name: value.flatten(0, 1) for name, value in tensors.items()}
    sizes = [1] * len(tensors[main]) if grid is None else grid.prod(dim=-1).tolist()
    if any(not value.dim() or len(value) not in (len(sizes), sum(sizes)) for value in tensors.values()):
        return None
    parts = [torch.split(value, 1 if len(value) == len(sizes) else sizes) for value in tensors.values()]
    entries = [dict(zip(tensors, entry, strict=True)) for entry in zip(*parts, strict=True)]
    if is_nested:
        entries = [entry for entry in entries if entry[main].any()]  # the model leaves out others, which are padding
    lengths, beside = [stop - start for _, start, stop in runs], tensors.keys() - {main}
    weights = sizes
    if grid is None:  # entries that differ beside their pixels fill a run each
        are_alike = all(torch.equal(entry[name], entries[0][name]) for entry in entries for name in beside)
        weights = [1] * len(entries) if are_alike else lengths
    counts = [divmod(weight * sum(lengths), sum(weights) or 1) for weight in weights]
    if not entries or len(counts) != len(entries) or any(rest or not count for count, rest in counts):
        return None
    found, entry = list[range](), 0
    for length in lengths:
        first, left = entry, length
        while left > 0 and entry < len(entries):
            left -= counts[entry][0]
            entry += 1
        if left:
            return None  # entries end elsewhere than runs
        found.append(range(first, entry))
    return _Content(given, entries, found, is_nested) if entry == len(entries) else None


# Where tokens stand: positions of one number (None: those passed are such already); how far the images of each row have
# moved later positions (None: not known); and how far each number of a position is from where text would stand, [R, T]
_Placed = tuple[Tensor | None, Sequence[int | None], Sequence[Tensor]]


def _placed(positions: Any, mask: Any, inside: Tensor, shifts: Sequence[int | None]) -> _Placed | None:
    """Return where tokens stand; None where positions do not count up by one outside of images.

    Positions are [R, T], [1, T] or [N, R, T], where the first of four numbers counts tokens. Images fill the columns
    `inside`, [R, T], and have moved the positions of rows that resume by `shifts`.
    """
    has_images, num_rows = bool(inside.any()), len(inside)
    if not isinstance(positions, Tensor):
        return None, [None] * num_rows if has_images else shifts, ()
    known = [shift for shift in shifts if shift is not None]
    is_known, moved = len(known) == num_rows, torch.tensor(known, device=positions.device)[:, None]
    if positions.dim() == 2:
        return positions - moved if is_known and any(known) else None, shifts, ()
    if not is_known or positions.dim() != 3 or positions.shape[0] not in (1, 3, 4):
        return None
    if positions.shape[1] not in (1, num_rows):
        return None
    if has_images:
        return _placed_images(positions.expand(-1, num_rows, -1), mask, inside)
    counted, rope = positions[:-3], positions[-3:]
    text = rope[-1] - moved
    is_text = (rope == rope[-1]).all() & (counted == text).all()
    return (text, shifts, ()) if bool(is_text) else None


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
    return text.to(positions.device), moved[0, :, -1].tolist(), [*moved]


def _is_read_by_place(model: Any, name: str) -> bool:
    """Return whether a model's own `prepare_inputs_for_generation` passes types of the whole sequence for a part."""
    ids = torch.zeros((1, 8), dtype=torch.int64, device="cpu")
    given = {"is_first_iteration": True, "use_cache": True, name: torch.zeros_like(ids)}
    try:
        types = model.prepare_inputs_for_generation(ids[:, 4:], **given).get(name)
    except Exception:  # noqa: BLE001 (a model may raise anything)
        return False
    return isinstance(types, Tensor) and types.shape[-1] == 8
