"""What every stage does before and after its own work: guard, configure, run, report, exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from rlhf import artifacts, config
from rlhf.errors import BadInput, Interrupted, explain

log = logging.getLogger("roundhouse")

SOURCE = Path("data/source")
TABLES = Path("data/tables")
RUNS = Path("runs")
INITIAL_METRICS = RUNS / "r0/metrics/sft.json"
EARLIER = "earlier.parquet"
"""In a round's preferences: earlier rounds' pairs that it does not use, for the rounds after it."""


def quiet_libraries() -> None:
    """Silence what libraries print by default; our own messages stay."""
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore")


def prepare_torch(threads: int) -> None:
    """Fix what decides the bits of a CPU result: thread counts and deterministic kernels."""
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    # A debugging aid of deterministic mode that costs 8 %.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    transformers_logging.disable_progress_bar()


def main(
    stage: str,
    run: Callable[[config.Pipeline], None],
    *,
    sees_gold: bool = False,
) -> None:
    """Run a stage as a program: exit code 0, 2 (bad input) or 1 (failure), one message either way."""
    quiet_libraries()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # half-written outputs are removed
    try:
        pipeline = config.load()
        if pipeline.gold is not None and not sees_gold:
            from rlhf.rewards.firewall import forbid

            forbid(pipeline.gold.path)
        run(pipeline)
    except (Exception, KeyboardInterrupt, Interrupted) as error:
        message, code = explain(error)
        sys.stderr.write(f"{stage}: {message}\n")
        raise SystemExit(code) from None
    sys.stdout.flush()


def of_round(pipeline: config.Pipeline, name: str) -> config.Round:
    """The declared round of that name, or BadInput."""
    if name not in pipeline.rounds:
        raise BadInput(
            f"no round named {name}",
            where="pipeline.yaml rounds",
            mend=f"use one of {', '.join(pipeline.rounds)}",
        )
    return pipeline.rounds[name]


def of_candidate(pipeline: config.Pipeline, name: str) -> config.AnyCandidate:
    """The declared candidate of that name, or BadInput."""
    if name not in pipeline.candidates:
        raise BadInput(
            f"no candidate named {name}",
            where="pipeline.yaml candidates",
            mend=f"use one of {', '.join(pipeline.candidates)}",
        )
    return pipeline.candidates[name]


def settings(pipeline: config.Pipeline, *names: str) -> dict[str, object]:
    """Sections and values by dotted name, as `params` of dvc.yaml has them: what a stage's result depends on."""
    found: dict[str, object] = {}
    for name in names:
        value = pipeline.model_dump(mode="json", by_alias=True)
        for key in name.split("."):
            value = value[key]
        found[name] = value
    return found


def need(path: Path) -> Path:
    """The path if it exists, else BadInput that says which stage makes it."""
    if not path.exists():
        command = artifacts.remake(path)
        raise BadInput(
            "not there",
            where=str(path),
            rule=f"made by {command.removeprefix('dvc repro ')}",
            mend=command,
        )
    return path


def initial_weights() -> str:
    """The hash of r0's weights, as sft names it: what pins them for a stage that reads them."""
    found = artifacts.read_json(need(INITIAL_METRICS)).get("weights_sha256")
    if not isinstance(found, str):
        raise BadInput(
            "weights_sha256 is missing",
            where=str(INITIAL_METRICS),
            rule="sft names the weights that it made",
            mend="dvc repro --force sft",
        )
    return found
