"""Whether a phone can take and run what is to be put on it, one line a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meki_edge.device.adb import EXIT_CODES
from meki_edge.device.phone_facts import PhoneFacts
from meki_edge.errors import UserError

OK, NOTE, FIX = "ok", "note", "fix"
ABI = "arm64-v8a"
LEAST_SDK = 29  # the harness is built for Android 10 and later
SPARE_BYTES = 256 << 20  # a phone whose storage is full misbehaves


@dataclass(frozen=True, kw_only=True)
class Check:
    """One answer. ``status``: ok, note (worth knowing) or fix (must be mended first)."""

    name: str
    status: str
    found: str
    fix: str = ""


def require(checks: list[Check], where: str) -> None:
    """Raise the first thing that must be mended.

    Raises:
        UserError: some check is not fulfilled.
    """
    for check in checks:
        if check.status == FIX:
            raise UserError(f"{check.name}: {check.found}", where=where, fix=check.fix)


def platform(facts: PhoneFacts, target: str) -> list[Check]:
    """What every phone must have."""
    return [
        _check(
            "adb shell",
            EXIT_CODES in facts.features,
            "exit codes and separate errors",
            "no exit codes (the phone's adb daemon has no shell_v2)",
            "use a phone with Android 10 or later",
        ),
        _check(
            "ABI",
            ABI in facts.abis,
            ABI,
            f"{', '.join(facts.abis) or 'unknown'}, the harness needs {ABI}",
            "use a 64-bit Arm phone",
        ),
        _android(facts),
        _check(
            "target folder",
            facts.writable and facts.executable,
            f"{target}: files can be written and run",
            f"{target}: files cannot be {'run' if facts.writable else 'written'} there",
            "choose a folder below /data/local/tmp with --target",
        ),
        _check(
            "digests",
            facts.has_sha256sum,
            "sha256sum is there",
            "the phone has no sha256sum, so pushed files could not be verified",
            "use a phone with Android 10 or later",
        ),
    ]


def _android(facts: PhoneFacts) -> Check:
    found = f"{facts.android or 'unknown version'} (API {facts.sdk or 'unknown'}), kernel {facts.kernel}"
    if facts.sdk is None:
        return Check(name="Android", status=NOTE, found=found, fix="make sure that it is Android 10 or later")
    problem = f"{found}: older than Android 10 (API {LEAST_SDK})"
    return _check("Android", facts.sdk >= LEAST_SDK, found, problem, "update the phone, or use another")


def chip(facts: PhoneFacts, compiled: Mapping[str, str]) -> list[Check]:
    """The phone's chip against that which each bundle's NPU binary is for (bundle → "sm8750")."""
    checks = []
    for name, wanted in compiled.items():
        title = f"chip for {name}"
        if not facts.soc:
            found = f"the phone does not tell its chip (ro.soc.model), the NPU binary is for {wanted}"
            checks.append(Check(name=title, status=NOTE, found=found, fix="make sure that it is this chip"))
            continue
        # A binary may be for several chips ("sm8650+sm8750"); "SM8750-AC" is a faster sm8750.
        fits = any(facts.soc.lower().startswith(chip_name) for chip_name in wanted.lower().split("+"))
        checks.append(
            _check(
                title,
                fits,
                f"{facts.soc}, as the NPU binary",
                f"the phone has {facts.soc}, the NPU binary is for {wanted}",
                f"run `meki-edge compile --chipset {facts.soc.lower()}` and pack again, or give --no-npu",
            )
        )
    return checks


def space(facts: PhoneFacts, needed_bytes: int) -> Check:
    """Whether ``needed_bytes`` more fit into the target folder's storage, with some to spare."""
    if facts.free_bytes is None:
        return Check(name="free space", status=NOTE, found="the phone does not tell", fix="watch it meanwhile")
    needed = needed_bytes + SPARE_BYTES if needed_bytes else 0
    free = f"{facts.free_bytes / 1e9:,.2f} GB"
    return _check(
        "free space",
        facts.free_bytes >= needed,
        f"{free} free, {needed_bytes / 1e9:,.2f} GB to be pushed",
        f"{free} free, {needed / 1e9:,.2f} GB needed ({SPARE_BYTES / 1e9:.2f} GB of it to spare)",
        "free some space on the phone; `meki-edge unload` removes bundles",
    )


def pages(facts: PhoneFacts, alignments: Mapping[str, int]) -> Check:
    """Whether programs and libraries (name → alignment in bytes) can be loaded with the phone's page size."""
    if facts.page_bytes is None:
        return Check(name="page size", status=NOTE, found="the phone does not tell", fix="4 KB is assumed")
    small = [name for name, alignment in alignments.items() if alignment < facts.page_bytes]
    return _check(
        "page size",
        not small,
        f"{facts.page_bytes} B",
        f"{facts.page_bytes} B, but {', '.join(small)} is built for smaller pages",
        "use a build for 16 KB pages (ONNX Runtime 1.22 or later; -Wl,-z,max-page-size=16384)",
    )


def _check(name: str, good: bool, found: str, problem: str, fix: str) -> Check:
    return Check(name=name, status=OK, found=found) if good else Check(name=name, status=FIX, found=problem, fix=fix)
