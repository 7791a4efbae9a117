"""A budget of minutes as a number of steps: decided once, written down, and kept when a run goes on.

The learning rate has to end with the budget, and a resumed run has to end with the same bits; both need the number of
steps before the first one.  So a run's own first steps are timed, on a copy of the drafter that is then forgotten,
and their mean says how many steps the minutes hold.  What is exact is the number of steps and the end of the cosine
on the last of them; the minutes are met as well as those first steps stand for the rest, and the run's log has what
was really spent.  Evaluations and checkpoints are not counted.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from blockdraft.config import ConfigError, TrainConfig
from blockdraft.targets.base import Target
from blockdraft.text import write_whole
from blockdraft.train.loop import time_steps
from blockdraft.train.run import Prepared

SKIPPED = 3  # steps that a process needs to warm up


@dataclass(frozen=True)
class Budget:
    """So many minutes are so many steps, by the mean of the steps that were timed."""

    minutes: float
    timed_steps: int
    seconds_per_step: float
    steps: int


def steps_in(minutes: float, timed: int, config: TrainConfig, target: Target, run: Prepared, path: Path) -> Budget:
    """The budget that `path` holds, or a new one, timed and written there before it is returned.

    Raises ConfigError if the file is damaged or of another budget.
    """
    if path.exists():
        try:
            known = Budget(**json.loads(path.read_text()))
        except (json.JSONDecodeError, TypeError):
            raise ConfigError(f"{path}: not a budget; delete it to have the steps timed again") from None
        if (known.minutes, known.timed_steps) != (minutes, timed):
            raise ConfigError(f"{path} is for {known.minutes} minutes by {known.timed_steps} steps; remove the run")
        return known
    seconds = time_steps(config, target, run.dataset, run.features, run.draft, SKIPPED, timed)
    budget = Budget(minutes, timed, seconds, max(int(minutes * 60 / seconds), 1))
    write_whole(path, json.dumps(asdict(budget), indent=2) + "\n")
    return budget
