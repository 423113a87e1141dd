"""The stages: one module each, runnable alone by `python -m tasks.<stage>`."""

import os

from rlhf import lifeline

# Before any stage imports torch: the seconds of imports are guarded too. Does nothing outside DVC and flows.
lifeline.hold()

# Threads that wait yield their core. Spinning makes a stage several times slower as soon as anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
