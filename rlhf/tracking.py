"""What people compare, sent to MLflow without slowing or endangering the work.

The only importer of mlflow.

A stage never talks to MLflow while it trains. It appends JSON lines to a spool,
`.scratch/tracking/<key>.jsonl`, which a kill leaves readable; a `Forwarder` sends them on in
batches. Under a flow that is a thread of the flow, so that stages do not import mlflow at all;
otherwise it is the stage's own process, at the end and, when the stage is long, from a thread. An
unreachable server costs a warning, not the run: the spool is sent by the next one.

Every run is flat (nested runs do not overlay in MLflow's charts) and is found again by the tags
`rlhf.key` and `rlhf.fingerprint`: the same settings and inputs continue their run, changed ones make
another. A point is written once: timestamps follow from the step, and an attempt that measures other
values than the one before it gets a run of its own. A run that was finished then stays, no longer
current; one that was not is deleted.

What runs in a copy that `dvc exp` made is recorded as a try, beside the round's runs.

A stage that continues from a checkpoint says so by `Run.resume`: what the killed attempt logged after
that checkpoint is forgotten, what it logged before stays. Any other attempt starts over.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from rlhf import champion
from rlhf.errors import BadInput
from rlhf.lifeline import alive, ident
from rlhf.progress import write_json

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

    from rlhf.config import Pipeline

FORWARDER_VARIABLE = "ROUNDHOUSE_FORWARDER"
TRY_VARIABLE = "ROUNDHOUSE_TRY"
"""Name of the try that a stage belongs to; its runs stay out of the round's own charts."""
FLOW_RUN_VARIABLES = ("ROUNDHOUSE_FLOW_RUN_ID", "PREFECT__FLOW_RUN_ID")
SPOOL = Path(".scratch/tracking")
UI = "http://127.0.0.1:5000"
"""Where MLflow's pages are while its store is a file."""

_log = logging.getLogger(__name__)
_REGISTRY = "registry.jsonl"  # events that belong to no one run: champions, output hashes
_SECONDS_BEFORE_THREAD = 20.0
_SECONDS_BETWEEN_DRAINS = 5.0
_MAX_PARAMS, _MAX_PARAM_LENGTH, _MAX_KEY_LENGTH = 500, 500, 250
_MAX_TAG_LENGTH = 5000
_NON_FINITE = "rlhf.non_finite"
_OUTPUTS = ("dvc.outputs", "dvc.md5")
_BATCH_METRICS, _BATCH_PARAMS = 1000, 100
_MILLISECONDS_PER_STEP = 1000

_open_runs: list[Run] = []


# --- what a stage calls --------------------------------------------------------------------------


def stage_run(
    pipeline: Pipeline,
    *,
    stage: str,
    key: str,
    round: str,
    kind: str,
    name: str,
    algorithm: str | None,
    params: Mapping[str, Any],
    inputs: str | None = None,
    folder: str | Path = ".",
) -> Run:
    """The MLflow run of one stage, as a context manager.

    Args:
        pipeline: the whole configuration; gives the experiment's name and the server.
        stage: module of `tasks/`, like `policy`.
        key: the stage's name in DVC, like `policy@r1-ppo`; with `params` and `inputs` it identifies
            the run.
        round: like `r1`.
        kind: what is compared with what: `sft`, `preferences`, `reward_model`, `policy`,
            `evaluation`, `round`.
        name: short, for legends: `r1/ppo`.
        algorithm: label of the candidate's algorithm, if any.
        params: settings, nested as they are; flattened to dotted names.
        inputs: a digest of the content that the stage reads.
        folder: where `pipeline.yaml` is.
    """
    folder = Path(folder).resolve()
    tags = {"rlhf.round": round, "rlhf.kind": kind, "rlhf.stage": stage, "rlhf.key": key}
    if algorithm is not None:
        tags["rlhf.algorithm"] = algorithm
    if inputs is not None:
        tags["rlhf.inputs"] = inputs
    experiment = _experiment(folder)
    if experiment is not None:
        key, name = f"{experiment}:{key}", f"{name} ({experiment})"
        tags["rlhf.key"] = key
    tried = os.environ.get(TRY_VARIABLE) or experiment
    if tried:
        tags |= {"rlhf.try": tried, "rlhf.kind": f"try-{kind}"}
    return Run(
        folder=folder,
        experiment=pipeline.project,
        uri=pipeline.tracking.uri,
        key=key,
        name=name,
        tags=tags,
        params=params,
    )


class Run:
    """Writes one run's events to its spool. Use `stage_run` to make one."""

    def __init__(
        self,
        *,
        folder: Path,
        experiment: str,
        uri: str | None,
        key: str,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
    ) -> None:
        canonical = json.dumps([dict(tags), params], sort_keys=True, default=str)
        self.fingerprint = hashlib.sha256(canonical.encode()).hexdigest()[:16]
        self.key = key
        self._folder = folder
        self._path = folder / SPOOL / f"{_file_name(key)}-{self.fingerprint[:8]}.jsonl"
        self._files = self._path.with_suffix("")
        self._start = {
            "event": "start",
            "time": _now(),
            "owner": ident(os.getpid()),
            "experiment": experiment,
            "uri": uri,
            "key": key,
            "fingerprint": self.fingerprint,
            "name": name,
            "tags": {**tags, "rlhf.fingerprint": self.fingerprint, **_origin(folder)},
            "params": params,
        }
        self._names: dict[str, str] = {}  # metric name -> curve | summary
        self._non_finite: list[str] = []
        self._began: int | None = None  # bytes in the spool before this attempt
        self._background: _Background | None = None

    def __enter__(self) -> Run:
        self._began = self._path.stat().st_size if self._path.exists() else 0
        self._append(self._start)
        _open_runs.append(self)
        if not _forwarder_lives():
            self._background = _Background(self._folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        status = "FINISHED"
        if kind is not None:
            status = "FAILED" if issubclass(kind, Exception) else "KILLED"
            self.tags({"rlhf.error": f"{kind.__name__}: {error}"})
        self._append({"event": "end", "time": _now(), "status": status})
        _open_runs.remove(self)
        begun = self._background.stop() if self._background is not None else False
        if status != "KILLED" or begun:  # ended from outside: leave the seconds to the checkpoint
            forward(self._folder)

    def position(self) -> int:
        """Where the run is, for a checkpoint: bytes of the spool, all events so far on the disk."""
        if not self._path.exists():
            return 0
        handle = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(handle)
            return os.fstat(handle).st_size
        finally:
            os.close(handle)

    def resume(self, position: int) -> None:
        """Go on from a checkpoint, before logging: the run has what it had at that `position`, and no more.

        A spool that was wiped since has nothing to keep; what MLflow holds of the run then stays up to
        the first step that is measured again.
        """
        if self._began is None:
            raise RuntimeError("resume a run inside its with block")
        lost = position > self._began
        kept = [] if lost else _Tail(self._path).read(0, position)[0]
        for event in kept:
            self._non_finite = _non_finite_names(event) or self._non_finite
        self._append({"event": "resume", "position": 0 if lost else position, "lost": lost})

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Points of curves; what is not finite is named in the tag `rlhf.non_finite` instead."""
        self._append(
            {"event": "metrics", "step": int(step), "values": self._finite(values, "curve", step)}
        )

    def summary(self, values: Mapping[str, float]) -> None:
        """Single numbers of the run. Their names must differ from those of its curves."""
        self._append({"event": "summary", "values": self._finite(values, "summary", None)})

    def tags(self, tags: Mapping[str, str]) -> None:
        """Words to search and group by."""
        self._append({"event": "tags", "tags": {k: str(v) for k, v in tags.items()}})

    def note(self, markdown: str) -> None:
        """Text shown above the run, and below it links that overlay the round's candidates and all rounds.

        The links are also tags, `rlhf.link.candidates` and so on.
        """
        self._append({"event": "note", "markdown": markdown})

    def link(self, name: str, target: str) -> None:
        """An address or path worth following from this run, as the tag `rlhf.link.<name>`."""
        self.tags({f"rlhf.link.{name}": target})

    def dataset(self, path: str | Path, name: str, context: str) -> None:
        """What the stage read or wrote, by the hash DVC knows it by.

        Args:
            path: file or directory.
            name: like `r1/preferences`.
            context: what for: `training`, `evaluation` ...
        """
        path = Path(path)
        relative = os.path.relpath(path.resolve(), self._folder)
        self._append(
            {
                "event": "dataset",
                "name": name,
                "context": context,
                "source": Path(relative).as_posix(),
                "md5": content_hash(path, self._folder),
            }
        )

    def figure(self, path: str | Path) -> None:
        """An image file, shown under `figures/`."""
        self.artifact(path, "figures")

    def artifact(self, path: str | Path, folder: str = "") -> None:
        """A small file or directory, copied now and sent later. Models stay in DVC."""
        source = Path(path)
        kept = self._keep(source.name)
        if source.is_dir():
            shutil.copytree(source, kept)
        else:
            shutil.copyfile(source, kept)
        self._append({"event": "file", "source": str(kept), "folder": folder})

    def table(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Rows that MLflow shows as a table, at `tables/<name>.json`."""
        columns = list(dict.fromkeys(column for record in records for column in record))
        rows = [[_plain(record.get(column)) for column in columns] for record in records]
        kept = self._keep(f"{name}.json")
        kept.write_text(json.dumps({"columns": columns, "data": rows}), encoding="utf-8")
        self._append({"event": "file", "source": str(kept), "folder": "tables", "table": True})

    def _keep(self, name: str) -> Path:
        """A fresh place for a file until it is sent."""
        place = self._files / f"{time.time_ns()}"
        place.mkdir(parents=True)
        return place / name

    def _finite(self, values: Mapping[str, float], use: str, step: int | None) -> dict[str, float]:
        kept = {}
        for name, value in values.items():
            if self._names.setdefault(name, use) != use:
                raise ValueError(
                    f"{name} is both a curve and a summary of {self.key}: a lone point would "
                    f"sit on the curve; rename one of them"
                )
            number = float(value)
            if math.isfinite(number):
                kept[name] = number
            else:
                self._non_finite.append(name if step is None else f"{name}@{step}")
                self.tags({_NON_FINITE: ", ".join(self._non_finite)[:_MAX_TAG_LENGTH]})
        return kept

    def _append(self, event: Mapping[str, Any]) -> None:
        _append(self._path, event)


def register_champion(pipeline: Pipeline, folder: str | Path = ".") -> None:
    """Let the registry follow `rlhf.champion`: its policy a version, with the alias `champion`.

    The model is named after the project. A version points at the directory that DVC holds; nothing is
    uploaded. There is one for each round and weights, however often this is called. What a copy of
    `dvc exp` promotes is nobody's champion.
    """
    from filelock import FileLock

    folder = Path(folder).resolve()
    if _experiment(folder) is not None:
        return
    path = folder / SPOOL / _REGISTRY
    path.parent.mkdir(parents=True, exist_ok=True)
    # Read and written in one go, so that of two processes the later event knows of both their changes.
    with FileLock(path.with_suffix(".lock"), timeout=120):
        try:
            _append(path, _champion_event(pipeline, folder))
        except BadInput as error:
            _log.warning("MLflow's alias champion stays where it is: %s", error)
    if not _open_runs:
        forward(folder)


def _champion_event(pipeline: Pipeline, folder: Path) -> dict[str, Any]:
    """The champion, the tags of its version, and those of the model that say why it is the champion now."""
    from rlhf import config

    if (folder / "pipeline.yaml").is_file():  # a rollback may have been written since the start
        pipeline = config.load(folder / "pipeline.yaml")
    best = champion.champion(pipeline, folder)
    source = f"runs/{best.round}/promoted"
    if not (folder / source).is_dir():
        raise BadInput("the champion is not here", where=source, mend=f"dvc pull {source}")
    decision = champion.read_decision(folder, best.round)
    if decision is None and best.round != "r0":
        raise BadInput(f"{best.round} is being decided again", where=source)
    version = {"kind": "initial", "by": "none", "because": "fine-tuned start"}
    metrics = {}
    if decision is not None:
        version["kind"] = "promotion" if decision["decision"] is None else "decision"
        version["by"], version["because"], _ = champion.whose_word(decision)
        row = next(r for r in decision["candidates"] if r["candidate"] == best.candidate)
        metrics = {name: row[name] for name in config.METRICS if row.get(name) is not None}
    alias = {**version, "kind": best.kind}
    if best.kind == "rollback" and pipeline.rollback is not None:
        alias |= {"by": pipeline.rollback.by, "because": pipeline.rollback.because}
    named = {"round": best.round, "candidate": best.candidate or "none"}
    return {
        "event": "champion",
        "uri": pipeline.tracking.uri,
        "model": pipeline.project,
        "source": source,
        "identity": {"rlhf.round": best.round, "rlhf.weights": _weights(folder / source)},
        "tags": {
            **{f"rlhf.{name}": value for name, value in (named | version).items()},
            "rlhf.path": source,
            "rlhf.metrics": json.dumps(metrics, sort_keys=True),
        },
        "alias": {f"champion.{name}": value for name, value in (named | alias).items()},
    }


def _weights(policy: Path) -> str:
    """sha256 of a promoted policy, from its lineage or, for the fine-tuned start, from sft's metrics."""
    written = _read_json(policy / champion.LINEAGE).get("weights")
    if policy.parent.name == "r0":
        written = _read_json(policy.parent / "metrics" / "sft.json").get("weights_sha256")
    return str(written or champion.policy_digest(policy))


def tag_outputs(
    pipeline: Pipeline, round: str, folder: str | Path = ".", *, at_work: str | None = None
) -> None:
    """Tag the round's runs with the hashes that dvc.lock records for their outputs.

    Where DVC restored an earlier result from its cache, the run that made it becomes the current
    one again. A run that is tagged keeps its hashes. If no run is known to have made the outputs that
    are here, a finished current run without hashes is taken for their maker; if the current one made
    others, it steps back and the stage has no current run: charts show no numbers but those of what
    is here.

    Args:
        pipeline: the whole configuration.
        round: like `r1`.
        folder: where `pipeline.yaml` is.
        at_work: a stage to leave out, because dvc.lock still has what it made before.
    """
    folder = Path(folder).resolve()
    if _experiment(folder) is not None:
        return
    for key, outs in _locked_outputs(folder).items():
        if key == at_work or not any(path.startswith(f"runs/{round}/") for path in outs):
            continue
        _append(
            folder / SPOOL / _REGISTRY,
            {
                "event": "outputs",
                "uri": pipeline.tracking.uri,
                "experiment": pipeline.project,
                "key": key,
                "outputs": outs,
            },
        )
    if not _open_runs:
        forward(folder)


def log_rounds(
    pipeline: Pipeline,
    round: str,
    rows: Sequence[Mapping[str, Any]],
    figure: Callable[[Path], None],
    folder: str | Path = ".",
) -> bool:
    """Put the table `rounds` and its figure on a round's run; returns whether there was anything new.

    Args:
        pipeline: the whole configuration.
        round: the newest one that was decided; without a run of it here nothing is logged.
        rows: one for each round.
        figure: draws them into a PNG file.
        folder: where `pipeline.yaml` is.
    """
    spool = Path(folder).resolve() / SPOOL
    key = _file_name(f"promote@{round}")
    found = sorted(spool.glob(f"{key}-*.jsonl"), key=lambda path: path.stat().st_mtime)
    current = [p for p in found if _read_json(p.with_suffix(".state.json")).get("current")]
    if not found:
        return False
    place = spool / "rounds" / round  # stays: a spool's own files go when they have been sent
    place.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_plain(row.get(column)) for column in columns] for row in rows]
    content = {"columns": columns, "data": cells}
    if _read_json(place / "rounds.json") == content:
        return False
    figure(place / "rounds.png")
    path = (current or found)[-1]
    for name, inside in (("rounds.png", "figures"), ("rounds.json", "tables")):
        event = {"event": "file", "source": str(place / name), "folder": inside}
        _append(path, event | ({"table": True} if inside == "tables" else {}))
    write_json(place / "rounds.json", content)
    if not _open_runs:
        forward(folder)
    return True


def ui_address(uri: str | None, folder: str | Path = ".") -> str:
    """Where MLflow's pages are: at the server that the runs go to, if there is one. Never with its password.

    Args:
        uri: `tracking.uri`.
        folder: where `pipeline.yaml` is.
    """
    parts = urlsplit(tracking_uri(uri, Path(folder)))
    if parts.scheme not in ("http", "https"):
        return UI
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}"


def links(
    pipeline: Pipeline, round: str, ui: str | None = None, folder: str | Path = "."
) -> dict[str, str]:
    """Addresses worth opening.

    `candidates` (every candidate judged along its path, overlaid), `metric` (one of these curves,
    large), `training` (the training curves, overlaid) and `round` (the gate).

    Only what the round has is returned: nothing before its first run was sent to MLflow.
    `ui` is MLflow's address, by default `ui_address`.
    """
    ui = ui or ui_address(pipeline.tracking.uri, folder)
    states = [
        state
        for path in sorted((Path(folder) / SPOOL).glob("*.state.json"))
        if (state := _read_json(path)).get("run_id")
        and state.get("current")
        and state.get("round") == round
        and state.get("experiment") == pipeline.project
    ]
    found: dict[str, str] = {}
    for name, kind in (("candidates", "evaluation"), ("training", "policy")):
        overlaid = [state for state in states if state["kind"] == kind]
        if overlaid:
            found[name] = _charts_link(ui, overlaid[0]["experiment_id"], round, kind)
    judged = [state for state in states if state["kind"] == "evaluation"]
    metric = _telling_metric([state["curves"] for state in judged]) if judged else None
    if metric is not None:
        run_ids = [state["run_id"] for state in judged]
        found["metric"] = _metric_link(ui, judged[0]["experiment_id"], run_ids, metric)
    for state in states:
        if state["kind"] == "round":
            address = f"{ui}/#/experiments/{state['experiment_id']}/runs/{state['run_id']}"
            found["round"] = f"{address}?workflowType=machine_learning"
    return found


def try_links(
    pipeline: Pipeline,
    round: str,
    place: str | Path,
    ui: str | None = None,
    folder: str | Path = ".",
) -> dict[str, str]:
    """Addresses that overlay a try's candidates with the round's own.

    `metric`: one curve along every path, large, of this try and the round. `candidates`: all curves, of every try of
    the round and the round.

    Args:
        pipeline: the project's configuration.
        round: like `r2`.
        place: the try's folder.
        ui: MLflow's address, by default `ui_address`.
        folder: the project's folder.
    """
    ui = ui or ui_address(pipeline.tracking.uri, folder)
    states = [
        state
        for home, kind in ((Path(folder), "evaluation"), (Path(place), "try-evaluation"))
        for path in sorted((home / SPOOL).glob("*.state.json"))
        if (state := _read_json(path)).get("run_id")
        and state.get("current")
        and state.get("round") == round
        and state.get("kind") == kind
        and state.get("experiment") == pipeline.project
    ]
    if not states:
        return {}
    experiment = states[-1]["experiment_id"]
    found = {"candidates": _charts_link(ui, experiment, round, "evaluation", tries=True)}
    metric = _telling_metric([state["curves"] for state in states])
    if metric is not None:
        run_ids = [state["run_id"] for state in states]
        found["metric"] = _metric_link(ui, experiment, run_ids, metric)
    return found


def prepare_experiment(pipeline: Pipeline, folder: str | Path = ".") -> str:
    """The id of the project's experiment, which is made where the project keeps its artifacts."""
    folder = Path(folder).resolve()
    client = _client(pipeline.tracking.uri, folder)
    return _experiment_id(client, pipeline.project, pipeline.tracking.uri, folder)


def tracking_uri(uri: str | None, folder: Path) -> str:
    """MLFLOW_TRACKING_URI, else `tracking.uri`, else a sqlite file beside `pipeline.yaml`."""
    return (
        os.environ.get("MLFLOW_TRACKING_URI")
        or uri
        or f"sqlite:///{_project(folder.resolve()) / 'mlflow.db'}"
    )


def _project(folder: Path) -> Path:
    """The project's folder, also for the copy in which `dvc exp run --temp` and `--queue` run its stages."""
    copies = _copies(folder)
    return folder if copies is None else copies.parents[2]


def _copies(folder: Path) -> Path | None:
    """The directory of DVC's copies of the project, if the folder is in one."""
    for parent in folder.parents:
        if parent.parts[-3:] == (".dvc", "tmp", "exps"):
            return parent
    return None


def _experiment(folder: Path) -> str | None:
    """Name of the experiment whose copy of the project this is.

    None in the project itself, where `dvc exp run` without a copy is as good as an edit and `dvc repro`.
    """
    copies = _copies(folder)
    if copies is None:
        return None
    copy = folder.relative_to(copies).parts[0]
    return _file_name(os.environ.get("DVC_EXP_NAME") or copy)


def content_hash(path: Path, folder: Path) -> str:
    """The md5 DVC knows a file or directory by, from dvc.lock or computed."""
    relative = Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    for outs in _locked_outputs(folder).values():
        if relative in outs:
            return outs[relative]
    if path.is_file():
        return _md5(path)
    entries = [
        {"md5": _md5(file), "relpath": file.relative_to(path).as_posix()}
        for file in path.rglob("*")
        if file.is_file() and file.name != ".gitignore"
    ]
    entries.sort(key=lambda entry: entry["relpath"])
    text = json.dumps(entries, sort_keys=True).encode()
    return hashlib.md5(text, usedforsecurity=False).hexdigest() + ".dir"


# --- sending -------------------------------------------------------------------------------------


def forward(folder: str | Path = ".") -> bool:
    """Send what the spools hold, unless a living flow does so. A failure is a warning.

    Nothing is lost.
    """
    if _forwarder_lives():
        return True
    try:
        Forwarder(folder).drain()
    except Exception as error:  # whatever the server answers, the stage's work stands
        _log.warning(
            "MLflow did not take the metrics (%s: %s); they wait in %s for the next stage",
            type(error).__name__,
            str(error).splitlines()[0] if str(error) else "",
            SPOOL,
        )
        return False
    return True


class Forwarder:
    """Sends the spools of a folder to MLflow. Several processes may have one.

    Each drain holds a file lock.
    """

    def __init__(self, folder: str | Path = ".") -> None:
        self._folder = Path(folder).resolve()
        self._spools: dict[Path, _Spool] = {}
        self._registry = _Registry(self._folder)

    def drain(self) -> int:
        """Send everything written so far; returns how many events that were."""
        place = self._folder / SPOOL
        if not place.is_dir():
            return 0
        from filelock import FileLock

        sent = 0
        with FileLock(place / ".forward.lock", timeout=120):
            for path in sorted(place.glob("*.jsonl")):
                if path.name == _REGISTRY:
                    continue
                if path not in self._spools:
                    self._spools[path] = _Spool(path, self._folder)
                sent += self._spools[path].drain()
            sent += self._registry.drain()
        return sent


class _Background:
    """Forwards a long stage's points while it runs.

    Starts late, so that short stages pay nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._begun = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        if self._stop.wait(_SECONDS_BEFORE_THREAD):
            return
        self._begun = True
        while forward(self._folder) and not self._stop.wait(_SECONDS_BETWEEN_DRAINS):
            pass

    def stop(self) -> bool:
        """End the thread; returns whether it had begun to send."""
        self._stop.set()
        self._thread.join(timeout=120 if self._begun else 1)
        return self._begun


class _Attempts:
    """What a spool says, attempt by attempt. Each starts over, or keeps what the run had at a position."""

    def __init__(self) -> None:
        self._began: list[int] = []
        self._events: list[list[dict[str, Any]]] = []  # of each attempt, what it kept first

    @property
    def events(self) -> list[dict[str, Any]]:
        """What the run consists of now, in order."""
        return self._events[-1] if self._events else []

    @property
    def count(self) -> int:
        return len(self._began)

    def note(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._began.append(event["_end"])
            self._events.append([])
        elif self._events and event["event"] == "resume":
            self._events[-1] = [*self._at(event["position"]), *self._events[-1]]
        elif self._events:
            self._events[-1].append(event)

    def _at(self, position: int) -> list[dict[str, Any]]:
        number = bisect.bisect_right(self._began, position) - 1
        events = self._events[number] if number >= 0 else []
        return [event for event in events if event["_end"] <= position]


class _Ledger:
    """Which points a run should have and which it has."""

    def __init__(self) -> None:
        self.wanted: dict[tuple[str, int], float] = {}
        self.sent: dict[tuple[str, int], float] = {}
        self.curves: list[str] = []

    def note(self, event: Mapping[str, Any]) -> None:
        """Points of a curve at a step, or single numbers; other events hold no point."""
        if event["event"] not in ("metrics", "summary"):
            return
        for name, value in event["values"].items():
            self.wanted[name, event.get("step", 0)] = value
            if event["event"] == "metrics" and name not in self.curves:
                self.curves.append(name)

    def restart(self, events: Iterable[Mapping[str, Any]]) -> None:
        """These events are what the run consists of."""
        self.wanted = {}
        for event in events:
            self.note(event)

    def adopt_earlier(self) -> None:
        """Keep what MLflow has of each metric from before the first step that is measured now."""
        first: dict[str, int] = {}
        for name, step in self.wanted:
            first[name] = min(step, first.get(name, step))
        for (name, step), value in self.sent.items():
            if step < first.get(name, step + 1):
                self.wanted.setdefault((name, step), value)

    def pending(self) -> dict[tuple[str, int], float]:
        """Points still to send."""
        return {p: v for p, v in self.wanted.items() if p not in self.sent}

    def contradicted(self, *, ended: bool) -> bool:
        """Whether MLflow holds a point that is no longer true, which only a new run can mend.

        Until the run has ended, a point that is not wanted yet may be measured again.
        """
        return any(
            self.wanted[point] != value if point in self.wanted else ended
            for point, value in self.sent.items()
        )


class _Tail:
    """Complete lines of a growing file, from an offset on.

    A line cut short by a kill is skipped. `_end` of an event is the offset after its line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, start: int, stop: int | None = None) -> tuple[list[dict[str, Any]], int]:
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read() if stop is None else file.read(stop - start)
        whole = data[: data.rfind(b"\n") + 1]
        events, end = [], start
        for line in whole.splitlines(keepends=True):
            end += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                events.append({**event, "_end": end})
        return events, end


class _Spool:
    """One run's spool, and what is known of the run in MLflow: kept beside it as `.state.json`."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._state_path = path.with_suffix(".state.json")
        self._folder = folder
        self._tail = _Tail(path)
        self._state: dict[str, Any] = {"offset": 0}
        self._ledger = _Ledger()
        self._start: dict[str, Any] = {}
        self._attempts = _Attempts()
        self._delivered: set[int] = set()  # `_end` of events that are no points and were sent
        self._exact = (
            False  # whether the ledger's `sent` is what MLflow holds, not what the spool says
        )
        self._lost = False  # a resumed attempt found its spool wiped
        self._client: MlflowClient | None = None

    def drain(self) -> int:
        stored = _read_json(self._state_path) or {"offset": 0}
        if stored["offset"] > self._path.stat().st_size:  # the spool was wiped, and begun anew
            stored = {"offset": 0}
        if stored["offset"] == self._path.stat().st_size and stored.get("status") != "RUNNING":
            return 0
        if not self._start or stored["offset"] != self._state["offset"]:
            self._recall(stored)
        events, offset = self._tail.read(self._state["offset"])
        if not events:
            self._end_if_killed()
            return 0
        again = any(event["event"] == "start" for event in events)
        if again and stored.get("status") == "FINISHED" and _to_be_continued(events):
            return 0  # the finished run stays as it is until this attempt has an end
        ended = self._send(events)
        self._state.update(offset=offset, curves=self._ledger.curves)
        self._save()
        if ended and self._state["status"] == "FINISHED":  # others may be resumed, and made anew
            shutil.rmtree(self._path.with_suffix(""), ignore_errors=True)
        return len(events)

    def _recall(self, stored: dict[str, Any]) -> None:
        """Rebuild the ledger from the part of the spool that was sent."""
        self._state, self._ledger, self._start = stored, _Ledger(), {}
        self._attempts, self._delivered = _Attempts(), set()
        self._exact = self._lost = False
        for event in self._tail.read(0, stored["offset"])[0]:
            self._note(event)
            self._delivered.add(event["_end"])
        self._ledger.sent = dict(self._ledger.wanted)

    def _note(self, event: dict[str, Any]) -> None:
        self._attempts.note(event)
        if event["event"] == "start":
            self._start = event
        if event["event"] == "resume":
            self._lost = event["lost"]
        if event["event"] in ("start", "resume"):
            self._ledger.restart(self._attempts.events)
        else:
            self._ledger.note(event)

    def _send(self, events: list[dict[str, Any]]) -> bool:
        """Bring MLflow up to date with these events; returns whether the run has ended."""
        for event in events:
            self._note(event)
        if not self._start:  # the first line was lost: nothing can be said about this run
            return False
        now = self._attempts.events
        ends = [event["status"] for event in now if event["event"] == "end"]
        known, begins = self._run(), any(event["event"] == "start" for event in events)
        if known is None:
            known, begins = self._find(), True
        elif not self._exact and self._attempts.count > 1:
            self._ledger.sent, self._exact = self._points(), True
        if self._lost:
            self._ledger.adopt_earlier()
            self._lost = False
        # One that was stopped from outside is going to be continued.
        ended = bool(ends) and ends != ["KILLED"]
        if known is None:
            self._create()
        elif self._ledger.contradicted(ended=ended):
            if known.info.status != "FINISHED":
                self._mlflow().delete_run(self._state["run_id"])
            self._create()
        elif begins:
            self._take_up()
        self._send_points()
        for event in now:
            if (
                event["event"] not in ("metrics", "summary")
                and event["_end"] not in self._delivered
            ):
                self._send_event(event)
                self._delivered.add(event["_end"])
        return bool(ends)

    def _mlflow(self) -> MlflowClient:
        if self._client is None:
            self._client = _client(self._start["uri"], self._folder)
        return self._client

    def _run(self) -> Any | None:
        """The run in MLflow, None if it is not known or no longer there."""
        if self._state.get("uri") != tracking_uri(self._start["uri"], self._folder):
            return None
        from mlflow.exceptions import MlflowException

        try:
            run = self._mlflow().get_run(self._state["run_id"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _find(self) -> Any | None:
        """The run by its tags: the spool may be gone."""
        client, start = self._mlflow(), self._start
        self._state.update(
            uri=tracking_uri(start["uri"], self._folder),
            experiment=start["experiment"],
            experiment_id=_experiment_id(client, start["experiment"], start["uri"], self._folder),
        )
        self._ledger.sent, self._delivered = {}, set()
        found = _search(client, self._state["experiment_id"], start["key"], start["fingerprint"])
        if not found:
            return None
        if found[0].info.status == "FINISHED" and _to_be_continued(self._attempts.events):
            return None
        self._state["run_id"] = found[0].info.run_id
        self._ledger.sent, self._exact = self._points(), True
        return found[0]

    def _points(self) -> dict[tuple[str, int], float]:
        """What MLflow holds of the run."""
        client, run_id = self._mlflow(), self._state["run_id"]
        return {
            (name, point.step): point.value
            for name in client.get_run(run_id).data.metrics
            for point in client.get_metric_history(run_id, name)
        }

    def _create(self) -> None:
        client, start = self._mlflow(), self._start
        run = client.create_run(
            self._state["experiment_id"],
            start_time=start["time"],
            tags=_tag_values(start["tags"]),
            run_name=start["name"],
        )
        self._state["run_id"] = run.info.run_id
        self._ledger.sent, self._delivered, self._exact = {}, set(), True
        self._send_params(start["params"])
        self._take_up(tags=False)

    def _take_up(self, *, tags: bool = True) -> None:
        """The run is the current one of its key, and at work."""
        client, start = self._mlflow(), self._start
        run_id = self._state["run_id"]
        client.update_run(run_id, status="RUNNING")
        new = {**(start["tags"] if tags else {}), "rlhf.current": "true"}
        _log_batches(client, run_id, tags=_tag_values(new))
        _make_current(client, self._state["experiment_id"], start["key"], run_id, self._folder)
        self._state.update(
            key=start["key"],
            name=start["name"],
            round=start["tags"].get("rlhf.round"),
            kind=start["tags"].get("rlhf.kind"),
            status="RUNNING",
            current=True,
            curves=self._ledger.curves,
        )
        self._save()

    def _send_params(self, params: Mapping[str, Any]) -> None:
        flat = dict(_flatten(params))
        fitting = {
            name: value
            for name, value in flat.items()
            if len(value) <= _MAX_PARAM_LENGTH and len(name) <= _MAX_KEY_LENGTH
        }
        if len(flat) > _MAX_PARAMS or len(fitting) < len(flat):
            text = json.dumps(params, indent=2, sort_keys=True, default=str)
            fitting = dict(list(fitting.items())[: _MAX_PARAMS - 1])
            fitting["config_sha256"] = hashlib.sha256(text.encode()).hexdigest()
            self._mlflow().log_text(self._state["run_id"], text, "config.json")
        _log_batches(self._mlflow(), self._state["run_id"], params=fitting)

    def _send_points(self) -> None:
        from mlflow.entities import Metric

        pending = self._ledger.pending()
        if not pending:
            return
        base = self._mlflow().get_run(self._state["run_id"]).info.start_time
        points = [
            Metric(name, value, base + step * _MILLISECONDS_PER_STEP, step)
            for (name, step), value in pending.items()
        ]
        for i in range(0, len(points), _BATCH_METRICS):
            self._mlflow().log_batch(self._state["run_id"], metrics=points[i : i + _BATCH_METRICS])
        self._ledger.sent.update(pending)

    def _send_event(self, event: dict[str, Any]) -> None:
        client, run_id = self._mlflow(), self._state["run_id"]
        if event["event"] == "tags":
            _log_batches(client, run_id, tags=_tag_values(event["tags"]))
        elif event["event"] == "note":
            self._send_note(event["markdown"])
        elif event["event"] == "dataset":
            self._send_dataset(event)
        elif event["event"] == "file":
            self._send_file(event)
        elif event["event"] == "end":
            if event["status"] == "FINISHED":
                # Of an attempt that was stopped; of outputs that have been made anew.
                for name in {"rlhf.error", *_OUTPUTS} & set(client.get_run(run_id).data.tags):
                    client.delete_tag(run_id, name)
            client.set_terminated(run_id, status=event["status"], end_time=event["time"])
            self._state["status"] = event["status"]

    def _send_note(self, markdown: str) -> None:
        """The note's links are relative: they work at whatever address the page was opened."""
        found = _overlays(self._state["experiment_id"], self._start["tags"]["rlhf.round"])
        listed = "\n".join(f"- [{_OVERLAYS[name]}]({link})" for name, link in found.items())
        text = markdown[: _MAX_TAG_LENGTH - len(listed) - 2]
        ui = ui_address(self._start["uri"], self._folder)
        tags = {f"rlhf.link.{name}": f"{ui}/{link}" for name, link in found.items()}
        tags["mlflow.note.content"] = f"{text}\n\n{listed}"
        _log_batches(self._mlflow(), self._state["run_id"], tags=_tag_values(tags))

    def _send_dataset(self, event: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=event["name"],
            digest=event["md5"],
            source_type="local",
            source=json.dumps({"uri": event["source"]}),
        )
        tags = [
            InputTag("mlflow.data.context", event["context"]),
            InputTag("dvc.md5", event["md5"]),
        ]
        self._mlflow().log_inputs(self._state["run_id"], datasets=[DatasetInput(dataset, tags)])

    def _send_file(self, event: dict[str, Any]) -> None:
        client, run_id = self._mlflow(), self._state["run_id"]
        source = Path(event["source"])
        if not source.exists():
            _log.warning("%s was removed before it was sent to MLflow", source)
        elif source.is_dir():
            inside = "/".join(filter(None, [event["folder"], source.name]))
            client.log_artifacts(run_id, str(source), inside)
        else:
            client.log_artifact(run_id, str(source), event["folder"] or None)
        if event.get("table"):  # the tag that makes MLflow show a file as a table
            tags = client.get_run(run_id).data.tags
            known = json.loads(tags.get("mlflow.loggedArtifacts", "[]"))
            entry = {"path": f"tables/{source.name}", "type": "table"}
            if entry not in known:
                client.set_tag(run_id, "mlflow.loggedArtifacts", json.dumps([*known, entry]))

    def _end_if_killed(self) -> None:
        """A run whose process is gone without a word was killed."""
        if self._state.get("status") != "RUNNING" or not self._start:
            return
        if not alive(self._start["owner"]):
            self._mlflow().set_terminated(self._state["run_id"], status="KILLED")
            self._state["status"] = "KILLED"
            self._save()

    def _save(self) -> None:
        write_json(self._state_path, self._state)


class _Registry:
    """Events that belong to no one run: champions and the hashes of outputs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / SPOOL / _REGISTRY
        self._offset_path = folder / SPOOL / ".registry.offset.json"

    def drain(self) -> int:
        if not self._path.exists():
            return 0
        offset = _read_json(self._offset_path).get("offset", 0)
        events, end = _Tail(self._path).read(offset)
        for event in events:
            client = _client(event["uri"], self._folder)
            if event["event"] == "champion":
                self._register(client, event)
            elif event["event"] == "outputs":
                self._tag(client, event)
        if events:
            write_json(self._offset_path, {"offset": end})
        return len(events)

    def _register(self, client: MlflowClient, event: dict[str, Any]) -> None:
        from mlflow.exceptions import MlflowException

        name = event["model"]
        try:
            client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        version = self._version(client, name, event)
        for key, value in _tag_values(event["tags"]).items():
            if version.tags.get(key) != value:
                client.set_model_version_tag(name, version.version, key, value)
        model = client.get_registered_model(name)
        if str(model.aliases.get("champion")) != str(version.version):
            client.set_registered_model_alias(name, "champion", version.version)
        for key, value in _tag_values(event["alias"]).items():
            if model.tags.get(key) != value:
                client.set_registered_model_tag(name, key, value)

    def _version(self, client: MlflowClient, name: str, event: dict[str, Any]) -> Any:
        """The version with these weights, made if there is none."""
        from mlflow.exceptions import MlflowException

        identity = event["identity"]
        for version in client.search_model_versions(f"name = '{name}'"):
            if all(version.tags.get(key) == value for key, value in identity.items()):
                return version
        source = (self._folder / event["source"]).as_uri()
        try:
            return client.create_model_version(name, source=source, tags=identity)
        except MlflowException as error:  # a server refuses local paths that no run uploaded
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            return client.create_model_version(name, f"dvc://{event['source']}", tags=identity)

    def _tag(self, client: MlflowClient, event: dict[str, Any]) -> None:
        experiment = client.get_experiment_by_name(event["experiment"])
        if experiment is None:
            return
        text = json.dumps(event["outputs"], sort_keys=True)
        runs = _search(client, experiment.experiment_id, event["key"])
        current = [run for run in runs if run.data.tags.get("rlhf.current") == "true"]
        kept = _tag_values({"dvc.outputs": text})["dvc.outputs"]
        makers = [run for run in runs if run.data.tags.get("dvc.outputs") == kept]
        if makers:
            chosen = next((run for run in makers if run in current), makers[0])
            client.set_tag(chosen.info.run_id, "rlhf.current", "true")
            _make_current(
                client, experiment.experiment_id, event["key"], chosen.info.run_id, self._folder
            )
            return
        finished = [run for run in current if run.info.status == "FINISHED"]
        if not finished:  # a stage at work, or one that failed
            return
        if "dvc.outputs" in finished[0].data.tags:
            _make_current(client, experiment.experiment_id, event["key"], None, self._folder)
            return
        first = next(iter(event["outputs"].values()), "")
        tags = {"dvc.outputs": text, "dvc.md5": first}
        _log_batches(client, finished[0].info.run_id, tags=_tag_values(tags))


def _client(uri: str | None, folder: Path) -> MlflowClient:
    """A client with the noise and the telemetry off."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("DO_NOT_TRACK", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # What a server does not take now waits in the spool: no reason to keep a stage waiting for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return MlflowClient(tracking_uri(uri, folder), tracking_uri(uri, folder))


def _experiment_id(client: MlflowClient, name: str, uri: str | None, folder: Path) -> str:
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        local = tracking_uri(uri, folder) == tracking_uri(None, folder)
        place = (_project(folder) / "mlartifacts").as_uri() if local and not _server_set() else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException as error:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise error
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


def _server_set() -> bool:
    return bool(os.environ.get("MLFLOW_TRACKING_URI"))


def _search(
    client: MlflowClient, experiment_id: str, key: str, fingerprint: str | None = None
) -> list[Any]:
    where = f"tags.`rlhf.key` = '{key}'"
    if fingerprint is not None:
        where += f" and tags.`rlhf.fingerprint` = '{fingerprint}'"
    return list(client.search_runs([experiment_id], where, order_by=["start_time DESC"]))


def _make_current(
    client: MlflowClient, experiment_id: str, key: str, run_id: str | None, folder: Path
) -> None:
    """Of the runs of a key, this one alone is current: it stands in charts and links. None: none is."""
    for run in _search(client, experiment_id, key):
        if run.info.run_id != run_id and run.data.tags.get("rlhf.current") == "true":
            client.set_tag(run.info.run_id, "rlhf.current", "false")
    for path in (folder / SPOOL).glob("*.state.json"):
        state = _read_json(path)
        if state.get("key") == key and state.get("current") != (state.get("run_id") == run_id):
            write_json(path, {**state, "current": state.get("run_id") == run_id})


def _log_batches(
    client: MlflowClient,
    run_id: str,
    *,
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> None:
    from mlflow.entities import Param, RunTag

    param_list = [Param(name, value) for name, value in (params or {}).items()]
    tag_list = [RunTag(name, value) for name, value in (tags or {}).items()]
    for i in range(0, max(len(param_list), len(tag_list)), _BATCH_PARAMS):
        client.log_batch(
            run_id,
            params=param_list[i : i + _BATCH_PARAMS],
            tags=tag_list[i : i + _BATCH_PARAMS],
        )


# --- small parts ---------------------------------------------------------------------------------


def _forwarder_lives() -> bool:
    owner = os.environ.get(FORWARDER_VARIABLE)
    return bool(owner) and alive(str(owner))


def _append(path: Path, event: Mapping[str, Any]) -> None:
    """Add one line; a half line that a kill left behind is closed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(event, default=str).encode() + b"\n")


def _to_be_continued(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the attempt of these events is at work, or was stopped from outside."""
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    attempt = events[starts[-1] :] if starts else events
    return [event["status"] for event in attempt if event["event"] == "end"] in ([], ["KILLED"])


def _non_finite_names(event: Mapping[str, Any]) -> list[str]:
    names = event.get("tags", {}).get(_NON_FINITE) if event.get("event") == "tags" else None
    return str(names).split(", ") if names else []


def _file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.@-]", "-", key)


def _now() -> int:
    return int(time.time() * 1000)


def _plain(value: Any) -> Any:
    """A value JSON can hold; what is not finite becomes text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _tag_values(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: str(value)[:_MAX_TAG_LENGTH] for name, value in tags.items()}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested mappings as dotted names; lists and null as JSON."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{name}", text


def _origin(folder: Path) -> dict[str, str]:
    """Which code and which flow made a run."""
    tags = {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": _program(),
        "mlflow.user": os.environ.get("USER", "unknown"),
    }
    commit = _git(folder, "rev-parse", "HEAD")
    if commit:
        tags["mlflow.source.git.commit"] = commit
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
        tags["mlflow.source.git.dirty"] = str(bool(changed)).lower()
    for variable in FLOW_RUN_VARIABLES:
        if os.environ.get(variable):
            tags["prefect.flow_run_id"] = os.environ[variable]
            break
    return tags


def _program() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return f"python -m {spec.name}"
    return os.path.basename(sys.argv[0] or "python")


def _git(folder: Path, *words: str) -> str:
    try:
        result = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def _locked_outputs(folder: Path) -> dict[str, dict[str, str]]:
    """Stage name -> {path of an output: its hash}, from dvc.lock."""
    path = folder / "dvc.lock"
    if not path.is_file():
        return {}
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    lock = yaml.load(path.read_text(encoding="utf-8"), Loader=loader) or {}
    return {
        name: {
            out["path"]: out["md5"] for out in stage.get("outs") or [] if out.get("md5") is not None
        }
        for name, stage in (lock.get("stages") or {}).items()
    }


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _telling_metric(curves: Iterable[Sequence[str]]) -> str | None:
    """A metric that all runs share: a reward where there is one."""
    lists = [list(names) for names in curves]
    shared = [name for name in lists[0] if all(name in names for names in lists[1:])]
    for word in ("gold", "reward", "proxy", "score", "margin"):
        for name in shared:
            if word in name:
                return name
    return shared[0] if shared else None


_OVERLAYS = {
    "candidates": "this round's candidates, judged",
    "training": "this round's training curves",
    "rounds": "the candidates of all rounds, judged",
    "gate": "what each round promoted",
}


def _overlays(experiment: str, round: str) -> dict[str, str]:
    """Charts that overlay a round's candidates, and all rounds; relative to MLflow's address."""
    return {
        name: _charts_link("", experiment, of, kind).lstrip("/")
        for name, of, kind in (
            ("candidates", round, "evaluation"),
            ("training", round, "policy"),
            ("rounds", None, "evaluation"),
            ("gate", None, "round"),
        )
    }


def _charts_link(
    ui: str, experiment: str, round: str | None, kind: str, *, tries: bool = False
) -> str:
    """The runs of one kind in a round, or in all, as overlaid line charts; with its tries if asked."""
    where = " and ".join(
        f"tags.`rlhf.{tag}` = '{value}'"
        for tag, value in (("round", round), ("kind", kind), ("current", "true"))
        if value is not None
    )
    if tries:
        where = where.replace(f"= '{kind}'", f"LIKE '%{kind}'")
    return (
        f"{ui}/#/experiments/{experiment}/runs?workflowType=machine_learning"
        f"&compareRunsMode=CHART&searchFilter={quote(where, safe='')}"
    )


def _metric_link(ui: str, experiment: str, run_ids: Sequence[str], metric: str) -> str:
    values = {
        "runs": json.dumps(list(run_ids)),
        "metric": json.dumps(metric),
        "experiments": json.dumps([experiment]),
        "plot_metric_keys": json.dumps([metric]),
        "plot_layout": "{}",
        "x_axis": "step",
        "y_axis_scale": "linear",
        "line_smoothness": "1",
        "show_point": "false",
        "deselected_curves": "[]",
        "last_linear_y_axis_range": "[]",
    }
    return f"{ui}/#/metric?" + "&".join(f"{k}={quote(v, safe='')}" for k, v in values.items())


@contextmanager
def forwarding(folder: str | Path = ".", every: float = 2.0) -> Iterator[None]:
    """Forward a folder's spools from a thread while the block runs, and once more at its end."""
    stop = threading.Event()
    forwarder = Forwarder(folder)
    os.environ[FORWARDER_VARIABLE] = ident(os.getpid())
    warned = False

    def send() -> None:
        nonlocal warned
        try:
            forwarder.drain()
        except Exception as error:
            if not warned:
                _log.warning(
                    "MLflow does not answer (%s); metrics wait in %s", type(error).__name__, SPOOL
                )
            warned = True

    def work() -> None:
        while not stop.wait(every):
            send()

    thread = threading.Thread(target=work, name="mlflow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=120)
        os.environ.pop(FORWARDER_VARIABLE, None)
        send()
