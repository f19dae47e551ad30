"""What the lint finds, and the words it says it with."""

from __future__ import annotations

from dataclasses import dataclass

ERROR, WARNING = "error", "warning"

COMPILER = "compiler"
"""The NPU compiler refuses the graph, or leaves a part of it to the CPU."""
AI_HUB = "ai-hub"
"""The local compiler takes it; Qualcomm AI Hub does not."""
DEVICE = "device"
"""It compiles; a phone is said not to load it."""
NUMERICS = "numerics"
"""It compiles; what it computes is wrong."""
DIRECTORY = "directory"
"""The files of a directory do not belong together."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that would make a job fail, or its result worthless."""

    rule: str
    """A stable name, such as ``unsupported-op``."""
    severity: str
    """``error``, or ``warning``: it may well work."""
    source: str
    """Who imposes the rule: ``compiler``, ``ai-hub``, ``device``, ``numerics`` or ``directory``."""
    where: str
    """The file."""
    tensor: str | None = None
    """The graph's tensor it is about: of a node, its first output."""
    layer: str | None = None
    """The module of the model, such as ``model.layers.3.mlp.down_proj``, or as near as can be told."""
    what: str
    """What is wrong, in words that are the same for every tensor that has it."""
    fix: str
