"""Define what a check of `baton doctor` has found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        subject: what was checked.
        text: what was found.
        bad: whether it keeps Baton from running well.
        mend: what to do about it.
    """

    subject: str
    text: str
    bad: bool = False
    mend: str = ""

    @property
    def mark(self) -> str:
        """Return a cross for a bad finding, else a tick."""
        return "✗" if self.bad else "✓"
