"""A project folder of its own beside this checkout: for studies, benchmarks and tests that run whole rounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def environment() -> dict[str, str]:
    """The caller's, with this checkout importable and every telemetry off."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "DVC_NO_ANALYTICS": "1",
        "DO_NOT_TRACK": "true",
    }


def create(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A folder with pipeline.yaml (the default, changed), dvc.yaml and DVC without git; kept if it is there."""
    write(folder, change)
    if not (folder / ".dvc").is_dir():
        run(folder, "dvc", "init", "--no-scm", "--quiet")
        run(folder, "dvc", "config", "core.analytics", "false")
    return folder


def write(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The folder without DVC's own: enough for stages that are run by `python -m tasks.<stage>`."""
    folder.mkdir(parents=True, exist_ok=True)
    yaml = YAML()
    yaml.width = 4096
    pipeline = yaml.load((ROOT / "pipeline.yaml").read_text(encoding="utf-8"))
    pipeline["data"]["source"] = "world.txt"
    change(pipeline)
    with (folder / "pipeline.yaml").open("w", encoding="utf-8") as file:
        yaml.dump(pipeline, file)
    shutil.copyfile(ROOT / "dvc.yaml", folder / "dvc.yaml")
    (folder / "world.txt").write_text(f"{pipeline['data']['world']}\n", encoding="utf-8")
    (folder / ".dvcignore").write_text("__pycache__\n.scratch\nmlartifacts\n", encoding="utf-8")
    return folder


def run(folder: Path, *command: str, **extra: str) -> str:
    """Run a command there; its standard output. CalledProcessError carries what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment(), **extra},
        check=False,
        text=True,
        capture_output=True,
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-8000:])
        done.check_returncode()
    return done.stdout


def small(pipeline: dict[str, Any]) -> None:
    """The CI-size world: 8 things, fewer labels with less noise, shorter runs. Seconds instead of minutes."""
    pipeline["data"]["world_options"] = {
        "num_things": 8,
        "num_demonstrations": 5000,
        "num_heldout": 200,
    }
    pipeline["sft"] |= {"batch_size": 32, "micro_batch_size": 32, "learning_rate": 4.0e-3}
    first = pipeline["rounds"]["r1"]
    first["preferences"] |= {"num_groups": 700, "num_heldout_groups": 250}
    first["preferences"]["labeler"]["noise"] = 0.25
    first["reward_model"] |= {"members": 1, "num_reference_samples": 256}
    candidates = pipeline["candidates"]
    for name in ("r1-ppo", "r1-grpo"):
        candidates[name] |= {"steps": 12, "learning_rate": 8.0e-4}
    candidates["r1-ppo"]["value"]["warmup_steps"] = 1
    candidates["r1-grpo"] |= {"steps": 6, "checkpoint_every": 3}
    candidates["r1-dpo"] |= {"epochs": 1, "pairs_per_group": 1, "checkpoint_every": 6}
    pipeline["evaluation"] |= {"final_samples_per_prompt": 13, "best_of_n_samples": 16}


def minimal(pipeline: dict[str, Any]) -> None:
    """Every stage works, on as little as that takes: a round is a few seconds of computing. Little is learned."""
    small(pipeline)
    pipeline["model"]["demo"] |= {
        "hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 48
    }  # fmt: skip
    pipeline["data"]["world_options"] = {
        "num_things": 4, "num_demonstrations": 480, "num_heldout": 64
    }  # fmt: skip
    threads = pipeline["resources"]["threads"]
    threads |= dict.fromkeys(threads, 1)
    pipeline["resources"]["checkpoints"] |= {"every_steps": 3}
    pipeline["sft"] |= {"warmup_steps": 4, "evaluate_every": 6}
    first = pipeline["rounds"]["r1"]
    first["preferences"] |= {
        "num_groups": 64, "num_heldout_groups": 24, "samples_per_prompt": 3, "sampling_batch_size": 48
    }  # fmt: skip
    first["reward_model"] |= {
        "members": 2, "epochs": 2, "groups_per_batch": 16, "micro_batch_size": 16, "warmup_steps": 2,
        "num_reference_samples": 32,
    }  # fmt: skip
    candidates = pipeline["candidates"]
    sizes = {"prompts_per_step": 16, "micro_batch_size": 8, "checkpoint_every": 3}
    candidates["r1-ppo"] |= {**sizes, "steps": 6}
    candidates["r1-ppo"]["value"]["warmup_steps"] = 2
    candidates["r1-grpo"] |= {**sizes, "steps": 6, "prompts_per_step": 4, "samples_per_prompt": 4}
    candidates["r1-dpo"] |= {
        "batch_size": 16, "micro_batch_size": 16, "warmup_steps": 2, "checkpoint_every": 4
    }  # fmt: skip
    pipeline["evaluation"] |= {
        "best_of_n_samples": 4,
        "choose_samples_per_prompt": 1, "report_samples_per_prompt": 1, "final_samples_per_prompt": 2,
        "sampling_batch_size": 32, "num_bootstrap": 100, "num_shown": 4,
    }  # fmt: skip
