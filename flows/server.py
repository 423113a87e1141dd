"""Starts the servers: Prefect's for a foreground run, both for people to look at. Loopback only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from flows import environment
from flows.runner import end_of
from rlhf.errors import StageFailed
from rlhf.lifeline import OWNERS_VARIABLE, alive, ident
from rlhf.progress import write_json

HOST = "127.0.0.1"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000
POOL = "roundhouse"
LOGS = Path(".scratch/logs")
_RECORD = "server.json"

# The server of a foreground run; it ends with the process that started it, even by kill -9.
_GUARDED = """
import sys
from rlhf import lifeline
lifeline.hold(grace=5)
import uvicorn
uvicorn.run("prefect.server.api.server:create_app", factory=True, host=sys.argv[1],
port=int(sys.argv[2]),
            log_level="error", lifespan="on", timeout_graceful_shutdown=3)
"""


# The worker ends with `python -m flows worker`, even by kill -9, and with it the flows it has started.
_GUARDED_WORKER = """
from rlhf import lifeline
lifeline.hold()
from prefect.cli import app
app()
"""


class Server:
    """A Prefect server of this process's own, or a running one."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None, log: str = ""):
        self.url = url
        self._process = process
        self._log = log

    def wait(self, seconds: float = 120.0) -> None:
        """Return when it answers."""
        end = time.monotonic() + seconds
        while not _answers(f"{self.url}/health"):
            if self._process is not None and self._process.poll() is not None:
                raise StageFailed(
                    f"the server did not start; the end of {self._log}:\n"
                    f"{end_of(Path(self._log), 8)}"
                )
            if time.monotonic() > end:
                raise StageFailed(
                    f"Prefect's server at {self.url} does not answer\n"
                    "  mend: start it, or unset PREFECT_API_URL to use one that starts by itself"
                )
            time.sleep(0.05)

    def ask_to_stop(self) -> None:
        """Begin to end it, if it is this process's own."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """End it, if it is this process's own."""
        self.ask_to_stop()
        if self._process is not None:
            try:
                self._process.wait(timeout=6)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def for_run(folder: str | Path = ".") -> Server:
    """The server a foreground run reports to.

    The user's, the project's if it runs, else one just for this run.

    Does not wait until it answers. Sets PREFECT_API_URL for this process.
    """
    url = os.environ.get("PREFECT_API_URL") or configured_url() or running_url(folder)
    if url:
        os.environ["PREFECT_API_URL"] = url
        return Server(url)
    port = free_port(0)
    log = log_file(folder, "prefect-server")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _GUARDED, HOST, str(port)],
            env={
                **os.environ,
                **environment.EPHEMERAL,
                OWNERS_VARIABLE: ident(os.getpid()),
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
                "PREFECT_UI_ENABLED": "0",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the flow: it still has something to report
        )
    url = f"http://{HOST}:{port}/api"
    os.environ["PREFECT_API_URL"] = url
    return Server(url, process, str(log))


def configured_url() -> str | None:
    """PREFECT_API_URL of the user's active Prefect profile."""
    path = Path.home() / ".prefect/profiles.toml"
    try:
        profiles = tomllib.loads(path.read_text(encoding="utf-8"))
        active = os.environ.get("PREFECT_PROFILE") or profiles.get("active", "")
        url = profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    except (OSError, ValueError):
        return None
    if url:  # the profile holds a key, perhaps: let Prefect read it
        os.environ["PREFECT_HOME"] = str(path.parent)
    return str(url) if url else None


def running_url(folder: str | Path = ".") -> str | None:
    """Address of the server that `server` or `ui` started for this project, if it still runs."""
    path = environment.home(folder) / _RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return str(record["url"]) if alive(record["owner"]) else None
    except (OSError, ValueError, KeyError):
        return None


def start_prefect(folder: str | Path = ".") -> tuple[subprocess.Popen[bytes], str]:
    """Start the project's Prefect server with its pages; returns the process and the address."""
    port = free_port(PREFECT_PORT)
    address = f"http://{HOST}:{port}"
    process = _start(
        [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)],
        folder,
        "prefect-server",
        {"PREFECT_UI_API_URL": f"{address}/api", "PREFECT_API_URL": f"{address}/api"},
    )
    home = environment.home(folder)
    home.mkdir(parents=True, exist_ok=True)
    write_json(home / _RECORD, {"url": f"{address}/api", "owner": ident(process.pid)})
    return process, address


def start_worker(environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start Prefect's process worker; what its flows print goes where ours does."""
    words = ["--no-prompt", "worker", "start", "--pool", POOL]
    return subprocess.Popen(
        [sys.executable, "-c", _GUARDED_WORKER, *words],
        env={**environ, OWNERS_VARIABLE: ident(os.getpid())},
    )


def start_mlflow(uri: str, folder: str | Path = ".") -> tuple[subprocess.Popen[bytes], str]:
    """Start MLflow's server with one worker on the project's store.

    Returns the process and the address.
    """
    port = free_port(MLFLOW_PORT)
    words = ["--host", HOST, "--port", str(port), "--workers", "1", "--backend-store-uri", uri]
    words += ["--default-artifact-root", (Path(folder).resolve() / "mlartifacts").as_uri()]
    command = [sys.executable, "-m", "mlflow", "server", *words]
    # Its job runners are eight more processes of 250 MB each, for features a tracking store does not use.
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = _start(command, folder, "mlflow-server", quiet)
    return process, f"http://{HOST}:{port}"


def wait_for(address: str, path: str, process: subprocess.Popen[bytes], name: str) -> None:
    """Return when a server just started answers."""
    Server(f"{address}{path}", process, str(LOGS / f"{name}.log")).wait()


def free_port(preferred: int) -> int:
    """The preferred port of the loopback interface if it is free, else the next free one above.

    0: any.
    """
    for port in [preferred, *range(preferred + 1, preferred + 100)] if preferred else [0]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StageFailed(f"no free port from {preferred} to {preferred + 99}")


def log_file(folder: str | Path, name: str) -> Path:
    """Where a server's output goes."""
    path = Path(folder) / LOGS / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _start(
    command: list[str], folder: str | Path, name: str, extra: dict[str, str]
) -> subprocess.Popen[bytes]:
    with log_file(folder, name).open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **extra},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
