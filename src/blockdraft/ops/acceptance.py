"""How much of a draft the target agrees with.

Letters: B rows, K drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept(drafts: Tensor, choices: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of the drafts that the target itself would have chosen.

    drafts [B, K] stand after the anchors; choices [B, K + 1] are the target's own tokens, choice k made
    after draft k (choice 0 after the anchor).  Drafts from widths[b] on are padding and never accepted.
    Returns num_accepted [B] and next_token [B], the target's choice after the last accepted draft.
    Exact for any drafter and any widths, because a choice never depends on the draft it is compared with.
    """
    within = torch.arange(drafts.shape[1], device=drafts.device) < widths[:, None]
    matches = (drafts == choices[:, :-1]) & within
    num_accepted = matches.long().cumprod(dim=1).sum(dim=1)
    return num_accepted, choices.gather(1, num_accepted[:, None]).squeeze(1)
