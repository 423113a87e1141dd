"""`python -m flows`: check, plan, run and look at rounds.

Light commands import neither torch, mlflow nor prefect.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from flows import environment
from rlhf.errors import BadInput, StageFailed, explain

environment.prepare()

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Declarative rounds of RLHF: check, plan, run and look.",
)

_CTRL_C = 130
RoundOption = Annotated[str | None, typer.Option("--round", help="Like r1; default: the last one.")]


@app.command()
def validate(
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print the file with presets and defaults filled in.")
    ] = False,
) -> None:
    """Check pipeline.yaml; every problem is named at once."""
    from rlhf import config, presets
    from rlhf.optimise.imported import check_imported

    pipeline = config.load("pipeline.yaml")
    config.check_files(pipeline)
    check_imported(pipeline)
    if resolved:
        print(config.as_yaml(pipeline), end="")
        return
    rounds, candidates = len(pipeline.rounds), len(pipeline.candidates)
    print(f"pipeline.yaml is valid: {rounds} round(s), {candidates} candidate(s)")
    for name, written in config.read_yaml("pipeline.yaml")["candidates"].items():
        departures = presets.differences(written)
        if departures:
            print(f"  {name} is {written['algorithm']} but for " + ", ".join(departures))


@app.command()
def plan(
    round: RoundOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show which stages would run now, in which order, and why."""
    from flows.plan import make_plan
    from rlhf import config

    config.load("pipeline.yaml")
    stages = make_plan(f"promote@{round}" if round else None)
    if as_json:
        print(json.dumps([stage.as_dict() for stage in stages], indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for stage in stages:
        mark = "[bold yellow]run [/]" if stage.runs else "[green]keep[/]"
        console.print(f"{mark} {stage.name}")
        console.print(f"       reads {', '.join(stage.inputs)}", style="dim", markup=False)
        for reason in stage.reasons:
            console.print(f"       {reason}", style="dim", markup=False)
    num = sum(stage.runs for stage in stages)
    console.print(f"{num} of {len(stages)} stages would run", style="bold")


@app.command()
def run(round: RoundOption = None) -> None:
    """Run a round to its decision, here and now; a new name is first appended to pipeline.yaml."""
    from flows import server
    from flows.report import print_report
    from flows.session import open_session

    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    _show_warnings()
    with open_session(round) as session:
        if not session.anything_to_run:
            print(f"{session.round}: everything is up to date")
            print_report(session.pipeline, session.round)
            return
        prefect_server = server.for_run()
        try:
            session.start_ahead()
            from flows.round import rlhf_round, send_logs  # imports prefect while a stage runs

            prefect_server.wait()
            try:
                state = rlhf_round(session.round, return_state=True)
            finally:
                send_logs()
            prefect_server.ask_to_stop()
            session.display.close()
            if not state.is_completed():
                raise StageFailed(_explain(state))
            print_report(session.pipeline, session.round)
        finally:
            session.runner.end_all()
            prefect_server.stop()


@app.command("round-add")
def round_add(name: str) -> None:
    """Append a round to pipeline.yaml, made from the last one."""
    from flows.rounds import append_round
    from flows.runner import workspace_lock

    with workspace_lock():
        changed = append_round("pipeline.yaml", name)
    print(f"{name} added to pipeline.yaml" if changed else f"{name} is already in pipeline.yaml")


@app.command()
def report(round: RoundOption = None) -> None:
    """Print a round's end again: table, samples, where to look."""
    from flows.report import print_report
    from rlhf import config

    pipeline = config.load("pipeline.yaml")
    print_report(pipeline, round or list(pipeline.rounds)[-1])


@app.command()
def ui(
    check: Annotated[bool, typer.Option(help="Stop once both answer.", hidden=True)] = False,
) -> None:
    """Open MLflow and Prefect in the browser: start both servers until Ctrl-C."""
    from flows import server
    from rlhf import config, tracking

    pipeline = config.load("pipeline.yaml")
    uri = tracking.tracking_uri(pipeline.tracking.uri, Path.cwd())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        if uri.startswith(("http://", "https://")):
            mlflow_address = uri
        else:
            process, mlflow_address = server.start_mlflow(uri)
            processes.append(process)
        prefect_url = os.environ.get("PREFECT_API_URL") or server.running_url()
        if prefect_url:
            prefect_address = prefect_url.removesuffix("/api")
        else:
            process, prefect_address = server.start_prefect()
            processes.append(process)
            server.wait_for(prefect_address, "/api", process, "prefect-server")
        if not uri.startswith("http"):
            server.wait_for(mlflow_address, "", processes[0], "mlflow-server")
        print(f"MLflow   {mlflow_address}")
        for name in pipeline.rounds:
            for kind, url in tracking.links(pipeline, name, mlflow_address).items():
                print(f"  {name} {kind}: {url}")
        print(f"Prefect  {prefect_address}/runs")
        print("Ctrl-C ends both.", flush=True)
        if not check:
            _stay(processes)
    finally:
        _end(processes)


@app.command("server")
def server_command() -> None:
    """Start this project's Prefect server until Ctrl-C."""
    from flows import server

    url = server.running_url()
    if url:
        raise StageFailed(f"a server of this project runs already at {url}")
    process, address = server.start_prefect()
    try:
        server.wait_for(address, "/api", process, "prefect-server")
        print(f"Prefect  {address}")
        print(f"for the prefect command:  export PREFECT_API_URL={address}/api", flush=True)
        _stay([process])
    finally:
        _end([process])


@app.command()
def worker() -> None:
    """Work on deployed rounds until Ctrl-C.

    Makes the pool, deploys prefect.yaml, polls every second.
    """
    from flows import server
    from flows.plan import check_workspace

    check_workspace()
    url = os.environ.get("PREFECT_API_URL") or server.configured_url() or server.running_url()
    if not url:
        raise BadInput(
            "no Prefect server runs for this project",
            rule="a worker asks a server for work",
            mend="in another terminal: python -m flows server (or set PREFECT_API_URL)",
        )
    os.environ["PREFECT_API_URL"] = url
    folder = str(Path.cwd())
    environ = {
        **os.environ,
        "ROUNDHOUSE_FOLDER": folder,
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
        "PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "1"),
    }
    server.Server(url).wait(20)
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    pool = ["work-pool", "create", "roundhouse", "--type", "process", "--overwrite"]
    for words in (pool, ["deploy", "--all"]):
        done = subprocess.run([*prefect, *words], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise StageFailed(f"prefect {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    print("ready; start a round with")
    print(f"  export PREFECT_API_URL={url}")
    print("  prefect deployment run 'rlhf-round/default' -p round=r1", flush=True)
    process = subprocess.Popen([*prefect, "worker", "start", "--pool", "roundhouse"], env=environ)
    try:
        _stay([process], "the worker")
    finally:
        _end([process])


def _explain(state: object) -> str:
    return str(getattr(state, "message", None) or "the flow did not complete")


def _show_warnings() -> None:
    """Our own warnings (MLflow does not answer) on standard error, though Prefect's console is silent."""
    assert logging.lastResort is not None
    logging.getLogger("rlhf").addHandler(logging.lastResort)


def _stay(processes: list[subprocess.Popen[bytes]], what: str = "a server") -> None:
    """Until Ctrl-C, or until one of them ends."""
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(0.3)
    except KeyboardInterrupt:
        return
    raise StageFailed(f"{what} ended by itself; servers write to .scratch/logs")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    from flows.runner import end_trees

    end_trees([process.pid for process in processes if process.poll() is None], grace=10)


def main() -> None:
    """Entry of the console script.

    A message instead of a traceback, 2 for bad input, 1 for failed work.
    """
    asked: list[int] = []  # signals that ask us to stop; libraries may wrap what they interrupt

    def stop(signum: int, frame: object) -> None:
        asked.append(signum)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)  # what runs is ended in both cases
    # A shell that starts us with & has SIGINT ignored, in us and in all we start.
    signal.signal(signal.SIGINT, stop)
    try:
        # Typer returns the code of an exit instead of raising it, and makes 130 of Ctrl-C.
        code = app(standalone_mode=False) or 0
        if asked or code == _CTRL_C:
            raise KeyboardInterrupt
        sys.exit(code)
    except (Exception, KeyboardInterrupt) as error:
        if not asked and hasattr(error, "show"):  # the command line's own errors show themselves
            error.show()
            sys.exit(getattr(error, "exit_code", 2))
        message, code = explain(KeyboardInterrupt() if asked else error)
        stopped = asked or isinstance(error, KeyboardInterrupt)
        print(message if stopped else f"error: {message}", file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main()
