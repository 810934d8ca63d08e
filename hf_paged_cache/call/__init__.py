"""The rows and forwards of one call: matched, admitted, scheduled, written, confirmed, committed. No transformers."""
