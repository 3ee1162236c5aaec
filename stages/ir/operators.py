"""Facts about operators that several stages need; names as in `Call.target`."""

from __future__ import annotations

OPAQUE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Operators with an output (a workspace) whose size and contents only the real kernel knows. The kernel makes it only
while gradients are enabled, and its backward crashes on any other contents."""
