"""A program that `hf-paged-cache run` has started, in this process."""

from __future__ import annotations

import pytest
from transformers import GenerationMixin

from hf_paged_cache.programs import program as running
from hf_paged_cache.programs.options import RunOptions
from hf_paged_cache.programs.program import Program


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    of_this_test = Program(RunOptions({}, None, True, 0))
    monkeypatch.setattr(running, "_running", of_this_test)
    monkeypatch.setattr(GenerationMixin, "generate", of_this_test.with_caches(GenerationMixin.generate))
    return of_this_test
