"""Finds the images of a prompt: which entries of what is passed fill which columns, and what a tower still has to run.

Works for models whose forward takes `mm_encoder_outputs`. transformers then runs the tower by `get_image_features` or
`get_video_features`, with the arguments that these have, and row `i` of the features fills placeholder `i`. Which
entries fill which columns follows from the shapes and grids passed. Where they do not add up, the prompt is computed
whole. Nothing here knows a model's name.
"""

import hashlib
import inspect
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..call.request import ForwardRequest
from ..model.placeholders import Placeholders, kind_of

ENCODED = "mm_encoder_outputs"
_KINDS = ("image", "video")


class Image(NamedTuple):
    """`Image` is what fills the columns `[start, stop)` of a row, as a whole.

    Attributes:
        entries: kind -> the numbers of the entries that fill the columns, in order.
        digest: digest of these entries.
    """

    start: int
    stop: int
    entries: Mapping[str, Sequence[int]]
    digest: bytes


class _Content(NamedTuple):
    """`_Content` is what is passed of one kind.

    Attributes:
        arguments: arguments of the encoder, as they were passed.
        bounds: name -> where each entry begins in that tensor, and where the last one ends.
        counts: number of placeholders that each entry fills; empty: not known.
        is_nested: True if the tensors' first two dimensions count entries.
    """

    arguments: Mapping[str, Any]
    bounds: Mapping[str, Sequence[int]]
    counts: Sequence[int] = ()
    is_nested: bool = False

    def part(self, name: str) -> Tensor:
        value: Tensor = self.arguments[name]
        return value.flatten(0, 1) if self.is_nested else value

    def chosen(self, entries: Sequence[int]) -> dict[str, Any]:
        """Return the encoder's arguments for some entries."""
        if [*entries] == [*range(len(next(iter(self.bounds.values()))) - 1)]:
            return dict(self.arguments)
        chosen = dict(self.arguments)
        for name, bounds in self.bounds.items():
            part = self.part(name)
            some = torch.cat([part[bounds[entry] : bounds[entry + 1]] for entry in entries])
            chosen[name] = some[None] if self.is_nested else some
        return chosen


class Towers(NamedTuple):
    """`Towers` encodes images of a model. Encoders are looked up when they run.

    Attributes:
        base: module that has the encoders.
        expand: repeats what encoders return for rows that run several times, as `generate` does.
    """

    base: Any
    expand: Any

    def run(self, kind: str, arguments: Mapping[str, Any]) -> Any:
        """Run an encoder, and return what it returns."""
        return getattr(self.base, f"get_{kind}_features")(**arguments, return_dict=True)


class PromptImages:
    """`PromptImages` holds the images of a prompt's rows.

    Attributes:
        rows: images of each row of the prompt, from left to right.
        arguments: names of the arguments that were passed for the encoders.
        pixels: names of the arguments without which `generate` runs no tower.
    """

    def __init__(
        self,
        towers: Towers,
        pixels: Collection[str],
        contents: Mapping[str, _Content],
        rows: list[list[Image]],
        ids: list[TokenIds],
    ) -> None:
        self.rows = rows
        self.pixels = pixels
        self.arguments = {name for content in contents.values() for name in content.arguments}
        self._towers = towers
        self._contents = contents
        self._ids = ids

    def of_row(self, number: int, num_rows: int) -> list[Image]:
        """Return the images of a row of a forward that may run each prompt several times, as beams do."""
        return self.rows[number * len(self.rows) // num_rows]

    def fit(self, request: ForwardRequest) -> bool:
        """Return whether the rows of a first forward begin with those of the prompt."""
        num_rows, num_prompts = len(request.rows), len(self.rows)
        return num_rows % num_prompts == 0 and all(
            row.token_ids[: len(ids) - row.pad] == ids[row.pad :]
            for number, row in enumerate(request.rows)
            for ids in (self._ids[number * num_prompts // num_rows],)
        )

    def encode(self, numbers: Sequence[int], num_rows: int, start: int = 0) -> dict[str, Any]:
        """Run the towers for images from a column on, and for no others; return their outputs for rows of a forward.

        Where rows with the same images stand side by side, such as beams, in groups of equal size, their images run
        once.

        Args:
            numbers: numbers of the rows that run, in order.
            num_rows: number of rows of the forward as it was passed.
            start: first column that runs, of those that were passed.
        """
        wanted = [[image for image in self.of_row(number, num_rows) if image.start >= start] for number in numbers]
        digests = [[image.digest for image in images] for images in wanted]
        runs = [len([*run]) for _, run in groupby(digests)]
        copies = math.gcd(*runs)
        entries: dict[str, list[int]] = {}
        for images in wanted[::copies]:
            for image in images:
                for kind, some in image.entries.items():
                    entries.setdefault(kind, []).extend(some)
        encoded = {kind: self._towers.run(kind, self._contents[kind].chosen(some)) for kind, some in entries.items()}
        if copies == 1 or not encoded:
            return encoded
        ids = [self._ids[number * len(self.rows) // num_rows][start:] for number in numbers[::copies]]
        expanded: dict[str, Any] = self._towers.expand(
            torch.tensor([[*row] for row in ids], device="cpu"), encoded, copies
        )
        return expanded


class ImageReader:
    """`ImageReader` finds the images among a model's arguments.

    Args:
        model: model whose encoders are held.
        placeholders: placeholders of the model.
    """

    def __init__(self, model: Any, placeholders: Placeholders) -> None:
        base, expand = getattr(model, "base_model", model), getattr(model, "_expand_multimodal_outputs", None)
        takes_features = ENCODED in inspect.signature(model.forward).parameters and expand is not None
        encoders = {kind: getattr(base, f"get_{kind}_features", None) for kind in _KINDS if takes_features}
        self._names = {
            kind: [name for name in inspect.signature(encoder).parameters if name not in ("kwargs", "return_dict")]
            for kind, encoder in encoders.items()
            if encoder is not None
        }
        self._pixels = {kind: [name for name in names if kind_of(name) == kind] for kind, names in self._names.items()}
        self._tokens = {
            kind: [token for token, kinds in placeholders.kinds.items() if kinds == {kind}] for kind in self._names
        }
        self._towers = Towers(base, expand)

    def __bool__(self) -> bool:
        """Return whether the model has an encoder."""
        return bool(self._names)

    def read(self, arguments: Mapping[str, Any]) -> PromptImages | str | None:
        """Read the images of a prompt from arguments of `generate` or of a forward.

        Cost: SHA-256 over the pixels; one wait for each device.

        Returns:
            the images; or why the prompt must be computed whole; or None: there are no images.
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
        found = _by_run(
            {kind: _content(given, runs[kind], len(rows)) for kind, given in passed.items()}, runs, len(rows)
        )
        found = found or _by_row({kind: _whole(given) for kind, given in passed.items()}, runs, len(rows), pixels)
        if found is None:
            return "entries of pixel_values and placeholders do not add up"
        return PromptImages(self._towers, pixels, *found, rows)


def _by_run(
    contents: Mapping[str, _Content | None], runs: Mapping[str, list[tuple[int, int, int]]], num_rows: int
) -> tuple[Mapping[str, _Content], list[list[Image]]] | None:
    """Return what is passed and the images of each row, one image a run of placeholders.

    None: the ends of entries are not those of runs.
    """
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
            digests = b"".join(_digest(content, number) for number in range(first, entry))
            entries = {kind: range(first, entry)}
            rows[row].append(Image(start, stop, entries, hashlib.sha256(digests).digest()))
        if entry != len(ends):
            return None
    return known, [sorted(row) for row in rows]


def _by_row(
    contents: Mapping[str, _Content | None],
    runs: Mapping[str, list[tuple[int, int, int]]],
    num_rows: int,
    pixels: Collection[str],
) -> tuple[Mapping[str, _Content], list[list[Image]]] | None:
    """Return what is passed and the images of each row, all images of a row as one.

    None: it is not known which entries belong to a row. Where there are several rows, each has one entry of its own,
    which is zeros where the row has no image: with fewer entries in one row, another one would have more than one.
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
            digests = b"".join(_digest(known[kind], number) for kind in entries)
            start, stop = min(spans)[0], max(stop for _, stop in spans)
            rows[number].append(Image(start, stop, entries, hashlib.sha256(digests).digest()))
    return known, rows


def _digest(content: _Content, entry: int) -> bytes:
    """Return the digest of an entry, in all tensors, and of the options of all entries."""
    options = {name: value for name, value in content.arguments.items() if name not in content.bounds}
    parts = [repr(sorted(options.items())).encode()]
    for name, bounds in sorted(content.bounds.items()):
        parts += [
            name.encode(),
            _digest_of(content.part(name)[bounds[entry] : bounds[entry + 1]]),
        ]
    return hashlib.sha256(b"\0".join(parts)).digest()


def _digest_of(tensor: Tensor) -> bytes:
    """Return the digest of a tensor's dtype, shape and values."""
    held = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{held.dtype} {tuple(held.shape)} ".encode())
    digest.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _runs(rows: Sequence[TokenIds], tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return each run of these tokens, as (row, first column, column after the last one)."""
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
    """Return all that is passed as one entry; None: something has no rows."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if not tensors or any(
        isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value) for value in given.values()
    ):
        return None
    if any(not value.dim() for value in tensors.values()):
        return None
    return _Content(given, {name: (0, len(value)) for name, value in tensors.items()})


def _content(given: Mapping[str, Any], runs: Sequence[tuple[int, int, int]], num_rows: int) -> _Content | None:
    """Return what is passed of a kind, cut into entries by shapes and grids; None: entries do not follow from these."""
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
    if is_nested and not bool(main.flatten(2).any(dim=2).all()):
        return None  # some entries are padding, which the model leaves out
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
