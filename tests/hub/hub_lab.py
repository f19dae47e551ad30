"""What the tests of AI Hub share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from server import Loopback

from export import aihub
from export.hub_ledger import Ledger
from export.hub_service import Timing
from export.hub_stage import Access

S24, S25 = "Samsung Galaxy S24 (Family)", "Samsung Galaxy S25 (Family)"
QUICK = Timing(poll_seconds=0.0, retry_seconds=0.01, outage_seconds=5.0)


@dataclass
class Lab:
    """The service, a ledger of its own, and a way in."""

    hub: Loopback
    ledger: Ledger
    directory: Path

    def access(self, *, timing: Timing = QUICK, resubmit: bool = False) -> Access:
        """As the command line makes it."""
        return Access(connect=lambda: aihub.connect(None, timing), ledger=self.ledger, resubmit=resubmit)

    def connect(self, timing: Timing = QUICK) -> aihub.AiHub:
        """The client."""
        return aihub.connect(None, timing)
