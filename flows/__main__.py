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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows import environment, round_commands
from rlhf.errors import BadInput, StageFailed, explain

if TYPE_CHECKING:
    from flows.session import Session

environment.prepare()

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Declarative rounds of RLHF: check, plan, run and look.",
)
app.add_typer(round_commands.app, name="round")

_CTRL_C = 130
_WAITS = 3  # for a person
_WIDTH = 120  # columns that the table of rounds takes
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
    round: Annotated[
        str | None, typer.Option("--round", help="Like r3, with all it depends on. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also name each stage that is up to date.")
    ] = False,
) -> None:
    """Show which stages would run now, in which order, why, for how long and at what cost."""
    from flows import plan_view

    found = plan_view.look(round)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        return
    from rich.console import Console

    for part in found.parts(everything=everything):
        Console(highlight=False).print(part)


@app.command("try")
def try_command(
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Values to try: candidates.r2-ppo.kl.coef=0.01,0.05. Several: every combination.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the try. Default: its candidates' names.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the trained policies in the try's folder.")
    ] = False,
    limit: Annotated[int, typer.Option(help="The most combinations.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Try other settings of a round's candidates, beside the round: nothing of it changes."""
    from flows import try_command as command

    _show_warnings()
    command.carry_out(settings or [], name=name, keep=keep, limit=limit, as_json=as_json)


@app.command()
def run(
    round: Annotated[
        str | None,
        typer.Option(
            "--round",
            help="Like r2; appended if it is new. Default: the last one if unfinished, else the next.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of an appended round: candidates.ppo.kl.coef=0.02"),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--from-template", help="The round an appended one is made from."),
    ] = None,
    commit: Annotated[
        str,
        typer.Option(help="Commit the decided round to git: always | able (if possible) | never."),
    ] = "always",
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Commit other changes of pipeline.yaml with it.")
    ] = False,
) -> None:
    """Run a round to its decision, here and now.

    Exit code 3: it waits for a person's decision.
    """
    from flows import server
    from flows.rounds import parse_overrides
    from flows.session import Request, open_session

    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    _show_warnings()
    overrides = parse_overrides(changes) if changes else None
    request = Request(round, overrides, template, allow_dirty, commit)  # type: ignore[arg-type]
    with open_session(request) as session:
        if not session.anything_to_run:
            print(f"{session.round}: everything is up to date")
            if session.status != "awaiting":
                session.conclude()
            _end_of_run(session)
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
            _end_of_run(session)
        finally:
            session.runner.end_all()
            prefect_server.stop()


def _end_of_run(session: Session) -> None:
    """The report, and what became of the commit; code 3 if it is a person's turn."""
    from flows.report import print_report

    print_report(session.pipeline, session.round)
    if session.committed:
        print(session.committed)
    if session.status == "awaiting":
        raise typer.Exit(_WAITS)


@app.command()
def decide(
    round: Annotated[str, typer.Argument(help="Like r3: one that has come to its gate.")],
    choice: Annotated[
        str,
        typer.Argument(
            help="promote | keep (the incoming policy) | stop (keep it, and start no further round) | "
            "gate (take an earlier word back)."
        ),
    ],
    because: Annotated[str, typer.Option(help="Why; for git, MLflow and the report.")],
    by: Annotated[str | None, typer.Option(help="Who. Default: git's user.name.")] = None,
    candidate: Annotated[
        str | None, typer.Option(help="With promote. Default: the one the gate ranks first.")
    ] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Commit other changes of pipeline.yaml with it.")
    ] = False,
) -> None:
    """Decide a round in the gate's place."""
    from flows import decisions
    from flows.report import print_report
    from rlhf import config

    _show_warnings()
    told = decisions.carry_out_decision(
        ".",
        round,
        choice,
        because=because,
        by=by,
        candidate=candidate,
        allow_dirty=allow_dirty,
    )
    print_report(config.load("pipeline.yaml"), round)
    for line in told:
        print(line)


@app.command()
def rollback(
    round: Annotated[
        str,
        typer.Argument(
            help="Like r2: the round to go back to; r0 is the start; none takes a rollback back."
        ),
    ],
    because: Annotated[str, typer.Option(help="Why; for git, MLflow and the report.")],
    by: Annotated[str | None, typer.Option(help="Who. Default: git's user.name.")] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Commit other changes of pipeline.yaml with it.")
    ] = False,
) -> None:
    """Make an earlier round's policy the champion again, and the start of the next round."""
    from flows import decisions

    _show_warnings()
    for line in decisions.carry_out_rollback(
        ".", round, because=because, by=by, allow_dirty=allow_dirty
    ):
        print(line)


@app.command()
def report(round: RoundOption = None) -> None:
    """Print a round's end again: table, samples, where to look."""
    from flows.report import print_report
    from rlhf import config

    pipeline = config.load("pipeline.yaml")
    print_report(pipeline, round or list(pipeline.rounds)[-1])


@app.command()
def rounds(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show all rounds side by side: champion, gold, proxy, KL, win rates, pairs, tokens, seconds."""
    from flows import overview
    from rlhf import config

    table = overview.rows(config.load("pipeline.yaml"))
    if as_json:
        print(json.dumps(table, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(overview.as_table(table, compact=console.width < _WIDTH))
    console.print(overview.LEGEND, style="dim")


@app.command()
def lineage(
    round: Annotated[
        str | None, typer.Argument(help="Like r3; default: the last one decided.")
    ] = None,
    disk: Annotated[
        bool, typer.Option("--disk/--no-disk", help="Compare the files here with the record.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what a round's policy descends from, down to the base model, and who decided."""
    from flows import lineage as lineages

    name = round or lineages.last_decided()
    if as_json:
        print(json.dumps(lineages.ancestry(".", name, disk=disk), indent=2))
        return
    from rich.console import Console

    Console(highlight=False).print(lineages.tree(".", name, disk=disk))


@app.command()
def verify(
    round: Annotated[str, typer.Argument(help="Like r3.")],
    ancestors: Annotated[
        bool, typer.Option("--all-ancestors", help="Also all that the round was made from.")
    ] = False,
    pull: Annotated[
        bool, typer.Option("--pull/--no-pull", help="Fetch what is missing from the DVC remote.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Hash every file of a round and compare it with what the tag round/rN records.

    Exit code 1: a file is missing or differs.
    """
    from flows.verify import verify as compare

    found = compare(".", round, pull=pull, ancestors=ancestors)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
        raise typer.Exit(0 if found.ok else 1)
    what = f"{found.num_files} files in {found.num_outputs} outputs of {', '.join(found.rounds)}"
    if found.pulled:
        print(f"pulled {', '.join(found.pulled)}")
    if not found.ok:
        problems = "\n".join(f"  {problem}" for problem in found.problems)
        raise StageFailed(
            f"{round} is not as {found.tag} ({found.commit[:10]}) records it\n{problems}"
        )
    print(f"{what}: as {found.tag} ({found.commit[:10]}) records them")


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
            mlflow_address = tracking.ui_address(uri)
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

    Makes the pool and the automation, deploys prefect.yaml, ends runs whose process is gone, polls every second.
    """
    from flows import deployments, server
    from flows.plan import check_workspace

    check_workspace()
    folder = Path.cwd()
    owner, runs = deployments.worker_of(folder)
    if runs:
        raise StageFailed(
            f"a worker of this folder runs already: process {str(owner).split(':')[0]}"
        )
    url = _server_url("a worker asks a server for work")
    deployments.check_declared(folder)
    os.environ["PREFECT_API_URL"] = url
    environ = {
        **os.environ,
        "ROUNDHOUSE_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "1"),
    }
    server.Server(url).wait(20)
    for name in deployments.end_lost_runs(url, folder):
        print(f"{name}: its process is gone; set to Crashed")
    deployments.ensure_automation(url)
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    pool = ["work-pool", "create", server.POOL, "--type", "process", "--overwrite"]
    for words in (pool, ["deploy", "--all"]):
        done = subprocess.run([*prefect, *words], env=environ, capture_output=True, text=True)
        if done.returncode:
            raise StageFailed(f"prefect {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    process = server.start_worker(environ)
    try:
        deployments.note_worker(folder, process.pid)
        print("ready; start a round with")
        print(f"  export PREFECT_API_URL={url}")
        print("  prefect deployment run 'rlhf-round/default'", flush=True)
        _stay([process], "the worker")
    finally:
        _end([process], grace=None)  # stages write a checkpoint
        with suppress(StageFailed):
            deployments.end_lost_runs(url, folder)


@app.command()
def automations() -> None:
    """Have the server set runs to Crashed whose heartbeat stops; `worker` does so too."""
    from flows import deployments, server

    url = _server_url("automations are the server's")
    server.Server(url).wait(20)
    made = deployments.ensure_automation(url)
    print(f'"{deployments.AUTOMATION}" ' + ("is made" if made else "is there already"))


@app.command()
def systemd(
    install: Annotated[
        bool,
        typer.Option("--install", help="Write them to ~/.config/systemd/user and start them."),
    ] = False,
) -> None:
    """Print systemd user units for this folder's server, worker and MLflow, or install them."""
    from flows import units
    from flows.plan import check_workspace

    check_workspace()
    if install:
        for line in units.install(Path.cwd()):
            print(line)
        return
    for name, text in units.filled(Path.cwd()).items():
        print(f"# {name}\n{text}")


def _server_url(rule: str) -> str:
    """Address of the API of the user's server, or of the one that runs for this project."""
    from flows import server

    url = os.environ.get("PREFECT_API_URL") or server.configured_url() or server.running_url()
    if not url:
        raise BadInput(
            "no Prefect server runs for this project",
            rule=rule,
            mend="in another terminal: python -m flows server (or set PREFECT_API_URL)",
        )
    return url


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


def _end(processes: list[subprocess.Popen[bytes]], grace: float | None = 10) -> None:
    from flows.runner import end_trees

    end_trees([process.pid for process in processes if process.poll() is None], grace)


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
