"""Where a round's policy comes from, down to the base model, and what it takes to make it again.

`runs/<round>/metrics/lineage.json`, kept by git, is written when a round is done: the policy with its
parent, reward model, data and settings as hashes, the code, the packages, and DVC's hash of every
output. The tree is read from these records and dvc.lock, so that a fresh clone without outputs has it
whole; where the outputs are there, they are compared with the record.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from flows import history, overview
from flows.history import Git
from rlhf import artifacts, config
from rlhf.champion import LINEAGE, policy_digest, read_decision, whose_word
from rlhf.errors import BadInput
from rlhf.resume import content_digest
from rlhf.tracking import SPOOL, ui_address

if TYPE_CHECKING:
    from rich.tree import Tree

FORMAT = 1
CODE = ("flows", "rlhf", "tasks")
PACKAGES = (
    "accelerate", "datasets", "dvc", "mlflow", "numpy", "pandas", "pandera", "prefect", "pyarrow",
    "roundhouse", "safetensors", "scipy", "tokenizers", "torch", "transformers", "vllm",
)  # fmt: skip
_NUM_SHOWN_DIGITS = 12
_TOKEN = re.compile(r"(gh[a-z]_|github_pat_|glpat-|hf_)[\w-]{16,}")


# --- the record ----------------------------------------------------------------------------------


def write_record(folder: str | Path, round: str) -> Path:
    """Write `runs/<round>/metrics/lineage.json`; a record of the same outputs stays as it is.

    Call it once the round is done and before it is committed: the code's commit is HEAD as it is now.
    A stage whose outputs are as an earlier record has them keeps the commit that made them.

    Raises:
        BadInput: the round has no result, or its promoted policy is not there.
    """
    folder = Path(folder)
    path = folder / _record_path(round)
    locked = history.read_lock(folder)
    outputs = history.outputs(locked, round)
    decision = read_decision(folder, round)
    if decision is None or not outputs:
        raise BadInput(
            f"{round} has no result",
            where=str(folder / f"runs/{round}/metrics/decision.json"),
            mend=f"python -m flows run --round {round}",
        )
    before = _readable(path)
    if before.get("format") == FORMAT and outputs == {
        name: stage.get("outputs") for name, stage in before.get("stages", {}).items()
    }:
        return path
    code = _code()
    by, because, at = whose_word(decision)
    record = {
        "format": FORMAT,
        "round": round,
        "decision": {
            "status": decision["status"],
            "promoted": decision["promoted"],
            "by": by,
            "because": because,
            "at": at,
        },
        "policy": _policy(folder, round),
        "inputs": _inputs(locked, outputs, round),
        "stages": {
            name: {"outputs": paths, "code_commit": _made_by(before, name, paths, code["commit"])}
            for name, paths in outputs.items()
        },
        "code": code,
        "project": _project(folder),
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": dict(_packages()),
        },
    }
    artifacts.write_json(path, record)
    return path


def _policy(folder: Path, round: str) -> dict[str, Any]:
    """What the round's promoted policy says of itself; one without a file of its lineage, as r0, in short."""
    place = folder / "runs" / round / "promoted"
    if not place.is_dir():
        raise BadInput("not there", where=str(place), mend=f"dvc pull promote@{round}")
    if (place / LINEAGE).is_file():
        return dict(artifacts.read_json(place / LINEAGE))
    pipeline = config.load(folder / history.PIPELINE)
    origin, candidate = overview.origin(pipeline, round, lambda name: read_decision(folder, name))
    return {"round": origin, "candidate": candidate, "weights": policy_digest(place)}


def _inputs(
    locked: Mapping[str, Any], stages: Mapping[str, Any], round: str
) -> dict[str, str | None]:
    """DVC's hash of what the round's stages read from outside the round."""
    return {
        dep["path"]: dep.get("md5")
        for name in stages
        for dep in locked[name].get("deps") or []
        if not dep["path"].startswith(f"runs/{round}/")
    }


def _made_by(
    before: Mapping[str, Any], stage: str, outputs: Mapping[str, str], commit: str | None
) -> str | None:
    known = before.get("stages", {}).get(stage, {})
    return known["code_commit"] if known.get("outputs") == outputs else commit


def _code() -> dict[str, Any]:
    """The program's own code: commit, changes to it, address, and a hash of what really ran."""
    root = Path(__file__).resolve().parents[1]
    hasher = hashlib.sha256()
    for package in CODE:
        for path in sorted((root / package).rglob("*.py")):
            hasher.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    git = Git(root)
    # An installed package may lie inside somebody's repository, which does not hold it.
    known = bool(git.text("ls-files", "--", "rlhf/__init__.py"))
    return {
        "commit": git.commit_of("HEAD") if known else None,
        "changed": sorted(git.status([*CODE])) if known else [],
        "remote": _remote(git) if known else None,
        "sha256": hasher.hexdigest(),
    }


def _project(folder: Path) -> dict[str, Any]:
    """The folder that holds pipeline.yaml: the commit before the round's, and changed code beside it."""
    git = Git(folder)
    commit = git.commit_of("HEAD")
    changed = git.status(["."]) if git.text("rev-parse", "--git-dir") else {}
    return {
        "commit": commit,
        "changed": sorted(path for path in changed if path.endswith((".py", "dvc.yaml"))),
    }


def _remote(git: Git) -> str | None:
    """Address of the code on a server, without credentials; None for a directory or nowhere."""
    names = (git.text("remote") or "").split()
    if not names:
        return None
    return public_url(git.text("remote", "get-url", "origin" if "origin" in names else names[0]))


def public_url(url: str | None) -> str | None:
    """A git address without user (but git), password, token or query; None for what is no server's."""
    if not url:
        return None
    if "://" not in url:
        found = re.fullmatch(r"([\w.-]+)@([\w.-]+:(?:[^/\\:@][^:@]*|/[^@]*))", url)
        if found is None:
            return None
        user, rest = found.groups()
        return _TOKEN.sub("...", "git@" * (user == "git") + re.split("[?#]", rest)[0])
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError where a password with a slash is taken for host and port
    except ValueError:
        return None
    if not parts.hostname or parts.scheme == "file" or "@" in parts.path:
        return None
    user, _, host = parts.netloc.rpartition("@")
    keep = "git@" if parts.scheme == "ssh" and user.partition(":")[0] == "git" else ""
    return _TOKEN.sub("...", urlunsplit((parts.scheme, keep + host, parts.path, "", "")))


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


# --- the tree ------------------------------------------------------------------------------------


def ancestry(folder: str | Path, round: str, *, disk: bool = True) -> dict[str, Any]:
    """The round's policy and everything it descends from, for programs.

    Args:
        folder: the project's folder.
        round: like `r3`.
        disk: read the policies, reward models and tables that are here, and compare them with the record.

    Every policy has `round`, `candidate`, `weights`, `decision`, `tag`, `commit`, `reward_model`,
    `pairs`, `data`, `code`, `problems` and `parent`, the next one; the last one has `base`.

    Raises:
        BadInput: the round is not there at all.
    """
    reader = _Reader(Path(folder), disk)
    if not reader.record(round) and not reader.policy_on_disk(round):
        raise BadInput(
            f"nothing is known of {round}",
            where=str(reader.folder / _record_path(round)),
            rule="written when a round is done, and kept by git",
            mend="dvc repro sft"
            if round == "r0"
            else f"python -m flows run --round {round}, if it is declared (or, if it ran elsewhere: git pull --tags)",
        )
    node = reader.node(round)
    top = node
    seen = {round}
    while (parent := node.pop("_parent")) is not None:
        if parent["round"] in seen:  # of records that were edited by hand
            node["problems"].append(f"{parent['round']} would be its own ancestor")
            break
        seen.add(parent["round"])
        node["parent"] = reader.node(parent["round"], expected=parent.get("weights"))
        node = node["parent"]
    return top


def last_decided(folder: str | Path = ".") -> str:
    """The last declared round with a decision. Raises BadInput if there is none."""
    folder = Path(folder)
    names = [
        name
        for name in config.load(folder / history.PIPELINE).rounds
        if read_decision(folder, name) is not None
    ]
    if not names:
        raise BadInput(
            "no round has come to its decision",
            where=str(folder / history.PIPELINE),
            mend="python -m flows run",
        )
    return names[-1]


def tree(folder: str | Path, round: str, *, disk: bool = True) -> Tree:
    """The same to print: the round's policy first, the base model last."""
    from rich.tree import Tree

    node: dict[str, Any] | None = ancestry(folder, round, disk=disk)
    shown = Tree(f"policy of [bold]{round}[/], and what each one started from", guide_style="dim")
    while node is not None:
        branch = shown.add(_heading(node))  # side by side: fifty rounds do not fit into one another
        for line in _lines(node):
            branch.add(line)
        node = node.get("parent")
    return shown


class _Reader:
    """What git, dvc.lock and the disk say of rounds."""

    def __init__(self, folder: Path, disk: bool) -> None:
        self.folder, self.disk = folder, disk
        self.git = Git(folder)
        self.in_git = self.git.text("rev-parse", "--git-dir") is not None
        self.lock = history.read_lock(folder)

    def json(self, round: str, name: str) -> dict[str, Any]:
        """A file of a round's metrics: of the folder, else as the round's tag has it."""
        path = f"runs/{round}/metrics/{name}"
        found = _readable(self.folder / path)
        if not found and self.in_git:
            found = _parsed(self.git.show(f"refs/tags/{history.tag(round)}", path))
        return found

    def record(self, round: str) -> dict[str, Any]:
        return self.json(round, "lineage.json")

    def policy_on_disk(self, round: str) -> dict[str, Any]:
        return _readable(self.folder / "runs" / round / "promoted" / LINEAGE)

    def md5(self, path: str) -> str | None:
        """What dvc.lock records of an output."""
        for entry in self.lock.values():
            for out in entry.get("outs") or []:
                if out["path"] == path:
                    return str(out.get("md5"))
        return None

    def node(self, round: str, expected: str | None = None) -> dict[str, Any]:
        """One policy: of the round, or the one that the round kept."""
        return self._start(expected) if round == "r0" else self._round(round, expected)

    def _round(self, round: str, expected: str | None) -> dict[str, Any]:
        record, problems = self.record(round), []
        policy = record.get("policy") or self.policy_on_disk(round)
        if not record:
            problems.append(f"no record in git: python -m flows run --round {round} writes it")
        commit = None
        if self.in_git:
            commit = self.git.commit_of(f"refs/tags/{history.tag(round)}")
            if commit is None:
                problems.append(f"no tag {history.tag(round)}")
        kept = policy.get("round", round) != round
        found = {
            "round": round,
            "kept": kept,
            "candidate": None if kept else policy.get("candidate"),
            "weights": policy.get("weights"),
            "decision": record.get("decision"),
            "tag": history.tag(round) if commit else None,
            "commit": commit,
            "code": record.get("code"),
            "problems": problems,
            "_parent": policy.get("parent"),
        }
        problems += self._unlike_lock(record)
        if expected and policy.get("weights") and expected != policy["weights"]:
            problems.append(
                f"what was made from it started from other weights ({_short(expected)}): "
                f"{round} was run or decided again since"
            )
        if kept:
            problems += self._unlike_policy(f"runs/{round}/promoted", policy)
            return {**found, "_parent": {key: policy[key] for key in ("round", "weights")}}
        places = {
            f"runs/{round}/reward_model": policy.get("reward_model") or {},
            "data/tables": policy.get("data") or {},
        }
        problems += self._unlike_policy(f"runs/{round}/promoted", policy)
        for place, digests in places.items():
            problems += self._unlike(place, digests)
        return {
            **found,
            "checkpoint": policy.get("checkpoint"),
            "algorithm": policy.get("algorithm"),
            "learns_from": policy.get("learns_from"),
            "reward_model": policy.get("reward_model"),
            "pairs": {
                **self.json(round, "preferences.json"),
                "md5": self.md5(f"runs/{round}/preferences"),
            },
            "data": policy.get("data"),
            "config": policy.get("config"),
            "mlflow": self._link(f"policy@{policy.get('candidate')}"),
        }

    def _start(self, expected: str | None) -> dict[str, Any]:
        """The fine-tuned policy and the base model it was made from."""
        sft = self.lock.get("sft") or {}
        settings = (sft.get("params") or {}).get(history.PIPELINE) or {}
        policy = {"weights": expected}
        return {
            "round": "r0",
            "kept": False,
            "candidate": None,
            "weights": expected,
            "md5": self.md5("runs/r0/promoted"),
            "base": settings.get("model"),
            "metrics": self.json("r0", "sft.json"),
            "data": {
                "data/tables": self.md5("data/tables"),
                "data/source": self.md5("data/source"),
            },
            "mlflow": self._link("sft"),
            "problems": self._unlike_policy("runs/r0/promoted", policy)
            + ([] if settings else ["sft is not in dvc.lock"]),
            "_parent": None,
        }

    def _unlike_lock(self, record: Mapping[str, Any]) -> list[str]:
        """Outputs for which the record and dvc.lock name different hashes."""
        if not self.lock:
            return ["no dvc.lock here"]
        return [
            f"dvc.lock has another {path} than the record"
            for stage in (record.get("stages") or {}).values()
            for path, md5 in stage["outputs"].items()
            if self.md5(path) != md5
        ]

    def _unlike_policy(self, place: str, policy: Mapping[str, Any]) -> list[str]:
        path = self.folder / place
        if not self.disk or not path.is_dir() or not policy.get("weights"):
            return []
        if policy_digest(path) == policy["weights"]:
            return []
        return [f"{place} on this disk is not the recorded policy: {artifacts.remake(place)}"]

    def _unlike(self, place: str, digests: Mapping[str, str]) -> list[str]:
        return [
            f"{place}/{name} on this disk is not the recorded one: {artifacts.remake(place)}"
            for name, digest in digests.items()
            if self.disk
            and (self.folder / place / name).exists()
            and content_digest(self.folder / place / name) != digest
        ]

    def _link(self, key: str) -> str | None:
        """The run in MLflow, where this checkout sent it."""
        for path in sorted((self.folder / SPOOL).glob("*.state.json")):
            state = _readable(path)
            if state.get("key") == key and state.get("current") and state.get("run_id"):
                ui = ui_address(state.get("uri"), self.folder)
                return f"{ui}/#/experiments/{state['experiment_id']}/runs/{state['run_id']}"
        return None


# --- words ---------------------------------------------------------------------------------------


def _heading(node: Mapping[str, Any]) -> str:
    from rich.markup import escape

    if node["round"] == "r0":
        return "[bold]r0[/] fine-tuned start"
    if node["kept"]:
        return f"[bold]{node['round']}[/] kept the incoming policy"
    name = escape(str(node["candidate"]))
    return f"[bold]{name}[/] {escape(str(node['checkpoint']))}, by {escape(str(node['algorithm']))}"


def _lines(node: Mapping[str, Any]) -> Iterator[str]:
    from rich.markup import escape

    lines: list[tuple[str, str]] = [("weights", _short(node["weights"] or node.get("md5")))]
    decision = node.get("decision")
    if decision:
        who = f"by {decision['by']}" + (f" at {decision['at']}" if decision["at"] else "")
        lines.append(("decision", f"{decision['status']} {who}: {decision['because']}"))
    if node.get("reward_model"):
        members = ", ".join(f"{k} {_short(v)}" for k, v in node["reward_model"].items())
        lines.append(("reward model", members))
    if node.get("pairs"):
        lines.append(("pairs", _pairs(node["pairs"])))
    if node.get("learns_from"):
        lines.append(("learns from", node["learns_from"]))
    if node.get("data"):
        lines.append(("data", ", ".join(f"{k} {_short(v)}" for k, v in node["data"].items())))
    if "base" in node:
        lines.append(("base model", _base(node["base"])))
    if node.get("commit"):
        lines.append(("git", f"{node['tag']} at {_short(node['commit'])}"))
    if node.get("code"):
        lines.append(("code", _code_words(node["code"])))
    if node.get("mlflow"):
        lines.append(("MLflow", node["mlflow"]))
    for name, words in lines:
        yield f"[dim]{name}[/] {escape(words)}"
    for problem in node["problems"]:
        yield f"[yellow]! {escape(problem)}[/]"


def _pairs(pairs: Mapping[str, Any]) -> str:
    counts = [
        f"{pairs[key]} {words}"
        for key, words in (
            ("train_pairs", "to train"),
            ("heldout_pairs", "held out"),
            ("carried_pairs", "of earlier rounds"),
        )
        if key in pairs
    ]
    return ", ".join([*counts, f"md5 {_short(pairs.get('md5'))}"])


def _base(model: Mapping[str, Any] | None) -> str:
    if not model:
        return "not known"
    if model.get("base") == "demo":
        sizes = ", ".join(f"{k} {v}" for k, v in (model.get("demo") or {}).items())
        return f"demo, new weights ({sizes})"
    revision = f" at {model['revision']}" if model.get("revision") else ""
    return f"{model.get('base')}{revision}"


def _code_words(code: Mapping[str, Any]) -> str:
    if code["commit"] is None:
        return f"in no git repository, sha256 {_short(code['sha256'])}"
    words = _short(code["commit"])
    if code["changed"]:
        words += f", with changes to {history.some(code['changed'])}"
    return words + (f" of {code['remote']}" if code["remote"] else "")


def _short(value: Any) -> str:
    text = str(value) if value else "not known"
    return text[:_NUM_SHOWN_DIGITS] if re.fullmatch(r"[0-9a-f]{32,}(\.dir)?", text) else text


def _record_path(round: str) -> str:
    return f"runs/{round}/metrics/lineage.json"


def _readable(path: Path) -> dict[str, Any]:
    """A JSON mapping, empty where there is none."""
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def _parsed(text: str | None) -> dict[str, Any]:
    import json

    try:
        content = json.loads(text or "")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
