"""How many drafts a round verifies."""

from __future__ import annotations

from collections.abc import Sequence


def verify_widths(limit: int, remaining: Sequence[int], room: Sequence[int]) -> list[int]:
    """Drafts to verify for each row.

    `limit` is what is proposed or allowed at all.  A row never verifies more than it may emit besides the
    target's own token, and since all rows go through one pass, none more than the fullest slot has room for.
    """
    limit = min(limit, min(room) - 1)
    return [min(limit, left - 1) for left in remaining]
