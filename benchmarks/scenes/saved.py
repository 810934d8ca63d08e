"""A prefix that another run has saved: loaded and gone on from, against computing it, and against reading its files."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, OURS, PLAIN_READ
from .registry import Lines, Repeat, scene
from .ways import Way, from_scratch, measure_rounds, share_not_computed
from .workbench import QUESTION_TOKENS, Bench


@scene("Saved prefixes", minutes=3)
def saved(bench: Bench, repeat: Repeat) -> Lines:
    """4,096 tokens that were saved: load them and answer the first question, against computing them; and the loading
    alone.
    """
    length = 4 * bench.sizes.shared
    text = bench.tokens(1, length)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writer = PagedPrefixCache(bench.model)
        writer.prefill(text)
        started = time.perf_counter()
        writer.store.fingerprint.identity()
        identified = time.perf_counter() - started
        writer.store.save(folder)
        reader = PagedPrefixCache(bench.model)
        reader.store.load(folder)

        def load(**options: Any) -> torch.Tensor:
            loaded = reader.store.load(folder)
            assert loaded.num_blocks == length // 16, loaded
            return text

        def read(**options: Any) -> torch.Tensor:
            for path in folder.glob("*.safetensors"):
                path.read_bytes()
            return text

        def forget() -> None:
            reader.reset()
            reader.store.reset_prefix_cache()

        def prepare() -> dict[str, Way]:
            forget()
            ids = torch.cat((text, bench.tokens(1, QUESTION_TOKENS)), dim=1)

            def ours(**options: Any) -> torch.Tensor:
                load()
                return bench.generate(ids, past_key_values=reader, new_tokens=1, **options)

            return {
                BASELINE: from_scratch(bench, ids, new_tokens=1),
                OURS: Way(ours, lambda: reader, forget),
            }

        details = {
            "identity_seconds": identified,
            "weights_gb": sum(weight.nbytes for weight in bench.model.parameters()) / 1e9,
            "file_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        }
        measured = measure_rounds(bench, prepare, rounds=repeat(5), warmups=bench.warmups)
        measured.hit_rate = share_not_computed(reader.last_call)
        yield (
            "saved_first_token",
            measured.line(
                f"{length:,} tokens from files, {QUESTION_TOKENS} question tokens, 1 new token: loading and answering, "
                "against computing all",
                at_least=bench.bar(8.0),
                details=details,
            ),
        )

        def prepare_loading() -> dict[str, Way]:
            forget()
            return {PLAIN_READ: Way(read, lambda: reader), OURS: Way(load, lambda: reader, forget)}

        loading = measure_rounds(bench, prepare_loading, rounds=repeat(20), warmups=bench.warmups)
        yield (
            "saved_loading",
            loading.line(
                f"loading {length:,} tokens into the pool, checksums and all, against reading the files",
                against=PLAIN_READ,
                at_least=bench.bar(0.5),
                details=details,
            ),
        )
