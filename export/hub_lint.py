"""Lint before anything is uploaded, and the rule that would have caught what the service refused."""

from __future__ import annotations

import re

from export.hub_service import HubDevice
from export.hub_source import Arm
from export.lint import lint
from meki_edge import console
from meki_edge.errors import UserError

SHOWN = 5
ERROR = "error"

RULES = (
    (r"int64|64.?bit", "int64-io"),
    (r"com\.microsoft|GroupQueryAttention|contrib", "com-microsoft-op"),
    (r"\bbool", "bool-tensor"),
    (r"dynamic|symbolic|unknown dim", "dynamic-shape"),
    (r"\.data\b|external data|onnx_data|\.onnx file", "external-data-name"),
    (r"2 ?gi?b|too large|exceeds.*(size|memory)|protobuf.*limit", "part-over-2gb"),
    (r"unsupported op|not supported|no implementation|unknown op|failed to convert", "unsupported-op"),
)
"""Words of the service's reason → the lint rule about them."""


def explain(reason: str) -> str | None:
    """The lint rule that would have caught a failure, if its words say which."""
    for pattern, rule in RULES:
        if re.search(pattern, reason, re.IGNORECASE):
            return rule
    return None


def require_clean(arm: Arm, devices: list[HubDevice]) -> None:
    """Lint an arm for every chip of ``devices``; warnings are shown, errors stop.

    Raises:
        UserError: the lint found errors: each would fail at the service after minutes.
    """
    chips = {device.chip.soc: device.chip for device in devices if device.chip is not None}
    seen: set[tuple[str, str, str | None]] = set()
    errors = []
    for chip in chips.values() or [None]:
        for finding in lint(arm.directory, target=chip):
            key = (finding.rule, finding.where, finding.tensor)
            if key in seen:
                continue
            seen.add(key)
            if finding.severity == ERROR:
                errors.append(finding)
            else:
                console.info(f"lint, {arm.name}: {finding.rule}: {finding.what} [{finding.where}]")
    if errors:
        told = "; ".join(f"{finding.rule}: {finding.what} [{finding.where}]" for finding in errors[:SHOWN])
        more = f" and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise UserError(f"lint found {len(errors)} errors: {told}{more}", where=arm.directory, fix=errors[0].fix)
