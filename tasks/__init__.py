"""The stages: one module each, runnable alone by `python -m tasks.<stage>`."""

import importlib.util
import os
import sys

from rlhf import lifeline

# DVC starts `python` as the PATH finds it, which need not be the environment that DVC itself runs in.
if importlib.util.find_spec("torch") is None:
    sys.stderr.write(
        f"{sys.executable}: this Python does not have the project's packages\n"
        "  rule: stages run with the `python` of the PATH\n"
        "  mend: source .venv/bin/activate, then dvc repro again\n"
    )
    sys.exit(2)

# Before any stage imports torch: the seconds of imports are guarded too. Does nothing outside DVC and flows.
lifeline.hold()

# Threads that wait yield their core. Spinning makes a stage several times slower as soon as anything else runs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
