"""A row as a line of JSON, whatever its columns hold."""

from __future__ import annotations

import base64
import json
import math
from typing import Any


def json_line(row: dict[str, Any]) -> str:
    """A row as a line of JSON, which knows no NaN and no infinity: they are written as null."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=as_json)
    except ValueError:
        text = json.dumps(_finite(json.loads(json.dumps(row, default=as_json))), ensure_ascii=False)
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        text = json.dumps(json.loads(text))  # half of a surrogate pair has no bytes of its own
    return text + "\n"


def as_json(value: Any) -> Any:
    """What a column may hold besides JSON: arrays and tensors, sets, bytes (as base64), dates and times, decimals."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)  # their own order is another one in each process
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
