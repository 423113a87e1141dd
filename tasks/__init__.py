"""The stages: one module each, runnable alone by `python -m tasks.<stage>`."""

from rlhf import lifeline

# Before any stage imports torch: the seconds of imports are guarded too. Does nothing outside DVC and flows.
lifeline.hold()
