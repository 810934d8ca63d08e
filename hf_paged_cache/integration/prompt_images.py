"""Finds the images of a prompt: which entries of what is passed fill which columns, and what a tower still has to run.

Works for models whose forward takes `mm_encoder_outputs`. transformers then runs the tower by `get_image_features` or
`get_video_features`, with the arguments that these have, and row `i` of the features fills placeholder `i`. Which
entries fill which columns follows from the shapes and grids passed. Where they do not add up, the prompt is computed
whole. Nothing here knows a model's name.
"""

import hashlib
import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..model.placeholders import Placeholders, kind_of

ENCODED = "mm_encoder_outputs"
_KINDS = ("image", "video")
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
    counts: Sequence[int]  # number of placeholders that each entry fills
    is_nested: bool  # the first two dimensions of what was passed count entries

    def of(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        """Return the encoder's arguments for some entries."""
        if [*numbers] == [*range(len(self.entries))]:
            return self.passed
        chosen = {name: torch.cat([self.entries[number][name] for number in numbers]) for name in self.entries[0]}
        if self.is_nested:
            chosen = {name: value[None] for name, value in chosen.items()}
        return {**self.passed, **chosen}

    def by_run(self, runs: Sequence[_Run]) -> list[range] | None:
        """Return the numbers of the entries that fill each run; None: the ends of entries are not those of runs."""
        found, entry = [], 0
        for _, start, stop in runs:
            first, left = entry, stop - start
            while left > 0 and entry < len(self.entries):
                left -= self.counts[entry]
                entry += 1
            if left:
                return None
            found.append(range(first, entry))
        return found if entry == len(self.entries) else None

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


class PromptImages:
    """`PromptImages` holds the images of a prompt's rows.

    Attributes:
        pixels: names of the arguments without which `generate` runs no tower.
        arguments: names of all arguments of the encoders that were passed.
    """

    def __init__(
        self,
        model: Any,
        pixels: Collection[str],
        contents: Mapping[str, _Content],
        rows: Sequence[Sequence[Image]],
        ids: Tensor,
    ) -> None:
        self.pixels = pixels
        self.arguments = {name for content in contents.values() for name in content.passed}
        self._model, self._contents, self._rows, self._ids = model, contents, rows, ids

    def of_row(self, number: int, num_rows: int) -> Sequence[Image]:
        """Return the images of a row of a forward that may run each prompt several times, as beams do."""
        return self._rows[number * len(self._rows) // num_rows]

    def fit(self, ids: Tensor) -> bool:
        """Return whether the rows of a first forward begin with those of the prompt."""
        copies, rest = divmod(len(ids), len(self._ids))
        prompts = self._ids.to(ids).repeat_interleave(copies, dim=0)
        return not rest and torch.equal(ids[:, : prompts.shape[1]], prompts)

    def encode(self, numbers: Sequence[int], num_rows: int, start: int = 0) -> dict[str, Any]:
        """Run the towers for images from a column on, and return their outputs for rows of a forward.

        Where rows with the same images stand side by side, in groups of equal size, their images run once.

        Args:
            numbers: numbers of the rows that run, in order, among `num_rows` rows that were passed.
        """
        wanted = [[image for image in self.of_row(number, num_rows) if image.start >= start] for number in numbers]
        digests = [[image.digest for image in images] for images in wanted]
        copies = math.gcd(*(len([*run]) for _, run in groupby(digests)))
        encoded = {}
        for kind, content in self._contents.items():
            entries = [
                at for images in wanted[::copies] for image in images if image.kind == kind for at in image.entries
            ]
            if entries:
                encode = getattr(_base_of(self._model), f"get_{kind}_features")
                encoded[kind] = encode(**content.of(entries), return_dict=True)
        if copies == 1 or not encoded:
            return encoded
        prompts = [number * len(self._ids) // num_rows for number in numbers[::copies]]
        expanded: dict[str, Any] = self._model._expand_multimodal_outputs(
            self._ids[prompts, start:].cpu(), encoded, expand_size=copies
        )
        return expanded


class ImageReader:
    """`ImageReader` finds the images among a model's arguments.

    Attributes:
        names: kind -> names of the arguments of its encoder; empty for a model that takes no images.
    """

    def __init__(self, model: Any, placeholders: Placeholders) -> None:
        takes_features = ENCODED in inspect.signature(model.forward).parameters
        takes_features = takes_features and hasattr(model, "_expand_multimodal_outputs")
        encoders = {kind: getattr(_base_of(model), f"get_{kind}_features", None) for kind in _KINDS if takes_features}
        self._model, self._placeholders = model, placeholders
        self.names = {
            kind: [name for name in inspect.signature(encoder).parameters if name not in ("kwargs", "return_dict")]
            for kind, encoder in encoders.items()
            if encoder is not None
        }

    def read(self, arguments: Mapping[str, Any]) -> PromptImages | str | None:
        """Read the images of a prompt from arguments of `generate` or of a forward.

        The result is a reason where the prompt must be computed whole, and None where there are no images.

        Cost: SHA-256 over the pixels, and a wait for the device of each entry.
        """
        ids = arguments.get("input_ids")
        passed = {
            kind: {name: arguments[name] for name in names if arguments.get(name) is not None}
            for kind, names in self.names.items()
        }
        passed = {kind: given for kind, given in passed.items() if any(kind_of(name) == kind for name in given)}
        if not passed or arguments.get(ENCODED) or not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return None
        rows: list[list[Image]] = [[] for _ in range(len(ids))]
        contents = {}
        for kind, given in passed.items():
            runs = _runs(ids.tolist(), {token for token, kinds in self._placeholders.kinds.items() if kinds == {kind}})
            ways = ((content, content.by_run(runs)) for content in _ways_to_cut(given, runs, len(ids)))
            content, found = next((way for way in ways if way[1] is not None), (None, None))
            if content is None or found is None:
                return "entries of pixel_values and placeholders do not add up"
            contents[kind] = content
            for (row, start, stop), numbers in zip(runs, found, strict=True):
                rows[row].append(Image(start, stop, kind, numbers, content.digest(numbers)))
        pixels = {name for kind, given in passed.items() for name in given if kind_of(name) == kind}
        return PromptImages(self._model, pixels, contents, [*map(sorted, rows)], ids)


def _base_of(model: Any) -> Any:
    """Return the module that has a model's encoders."""
    return getattr(model, "base_model", model)


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


def _ways_to_cut(given: Mapping[str, Any], runs: Sequence[_Run], num_rows: int) -> Iterator[_Content]:
    """Yield the ways in which shapes and grids may cut what is passed of a kind into entries."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    in_lists = [each for value in given.values() if isinstance(value, list | tuple) for each in value]
    main = next((name for name in tensors if "pixel_values" in name), None)
    if main is None or not runs or any(isinstance(each, Tensor) for each in in_lists):
        return
    pixels, ways = tensors[main], list[tuple[Mapping[str, Tensor], Sequence[int], bool]]()
    grid = next((value for name, value in tensors.items() if "grid" in name and value.dim() == 2), None)
    if main == "pixel_values" and pixels.dim() == 5 and len(pixels) == num_rows and grid is None:
        if all(value.dim() > 2 and value.shape[:2] == pixels.shape[:2] for value in tensors.values()):
            nested = {name: value.flatten(0, 1) for name, value in tensors.items()}
            ways.append((nested, [1] * len(nested[main]), True))
    ways.append((tensors, [1] * len(pixels) if grid is None else grid.prod(dim=-1).tolist(), False))
    lengths = [stop - start for _, start, stop in runs]
    for some, sizes, is_nested in ways:
        entries = _cut(some, sizes)
        if is_nested:
            entries = [
                entry for entry in entries if entry[main].any()
            ]  # the model leaves out others, which are padding
        weights = sizes if grid is not None else _weights(entries, main, lengths)
        counts = [divmod(weight * sum(lengths), sum(weights) or 1) for weight in weights]
        if entries and len(counts) == len(entries) and all(count and not rest for count, rest in counts):
            yield _Content(given, entries, [count for count, _ in counts], is_nested)


def _cut(tensors: Mapping[str, Tensor], sizes: Sequence[int]) -> list[Mapping[str, Tensor]]:
    """Return entries of these sizes, each with its part of all tensors; none where the tensors have other lengths."""
    if any(not value.dim() or len(value) not in (len(sizes), sum(sizes)) for value in tensors.values()):
        return []
    parts = [torch.split(value, 1 if len(value) == len(sizes) else [*sizes]) for value in tensors.values()]
    return [dict(zip(tensors, entry, strict=True)) for entry in zip(*parts, strict=True)]


def _weights(entries: Sequence[Mapping[str, Tensor]], main: str, lengths: Sequence[int]) -> Sequence[int]:
    """Return in which ratio entries fill placeholders: those that differ beside their pixels fill a run each."""
    are_alike = all(torch.equal(entry[name], entries[0][name]) for entry in entries for name in entry if name != main)
    return [1] * len(entries) if are_alike else lengths
