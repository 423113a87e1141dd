"""Environment of everything the flows start.

No telemetry, no noise, no server settings left to chance.

Import this before prefect: it reads its settings once. What the user has set stays.
"""

from __future__ import annotations

import os
from pathlib import Path

QUIET = {
    "DO_NOT_TRACK": "true",
    "DVC_NO_ANALYTICS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "5",  # a queued run looks again
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",  # deployments.py: three that are missing end a run
    "PREFECT_SHOW_SERVER_UI_NOTICE": "false",
    "TOKENIZERS_PARALLELISM": "false",
}

# Services that a flow without schedules and triggers does not need; a real server runs them all.
EPHEMERAL = {
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "90",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED": "false",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
    "PREFECT_SERVER_UI_ENABLED": "false",
}


def home(folder: str | Path = ".") -> Path:
    """The project's own folder for Prefect's database, so that projects do not meet."""
    return (Path(folder) / ".scratch/prefect").resolve()


def prepare(folder: str | Path = ".") -> None:
    """Set the environment of this process and of all it starts."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_HOME", str(home(folder)))
