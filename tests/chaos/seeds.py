"""The seed of what is drawn in the suite: the same in every run, so that a change is judged by its own faults.

`STOKER_CHAOS_SEED=N` gives another; the benchmarks (`faults`, `kills`, `load_faults`, `pod_cycles`) draw theirs anew.
Limits: the seed fixes what is done to whom, not the microsecond.
"""

from __future__ import annotations

import os
from typing import Final

SEED: Final = int(os.environ.get("STOKER_CHAOS_SEED", "0")) or 20_261_130
