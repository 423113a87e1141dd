"""The Prefect flow of one round. The order comes from DVC's graph.

Whether a stage is up to date is DVC's word.

Each stage that DVC would run becomes a Prefect task around one child process, `dvc repro
--single-item`. Nothing is rolled back when one fails: what runs is finished, nothing more starts,
and the next run goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from flows import environment

environment.prepare()

from prefect import flow, task  # noqa: E402
from prefect.artifacts import create_markdown_artifact  # noqa: E402
from prefect.cache_policies import NO_CACHE  # noqa: E402
from prefect.logging.handlers import APILogWorker  # noqa: E402
from prefect.runtime import flow_run  # noqa: E402
from prefect.states import Cancelled, Completed, Failed, State  # noqa: E402
from prefect.task_runners import ThreadPoolTaskRunner  # noqa: E402

from flows import report  # noqa: E402
from flows.session import Session, current_session, open_session  # noqa: E402
from rlhf import tracking  # noqa: E402

if TYPE_CHECKING:
    from flows.plan import Stage

_USES_A_DEVICE = ("sft", "preferences", "reward_model", "policy", "evaluate")


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
def run_stage(name: str) -> State[Any]:
    """Bring one stage up to date."""
    session = current_session()
    stage = session.stages[name]
    if not stage.runs:
        return Completed(message="up to date")
    if session.runner.halted:
        return Cancelled(message="not started: another stage failed")
    gpu = session.pipeline.resources.gpus > 0 and name.split("@")[0] in _USES_A_DEVICE
    with _gpu_slot() if gpu else nullcontext():
        outcome = session.runner.run(name, gpu=gpu)
    if outcome is None:
        return Cancelled(message="not started: another stage failed")
    if not outcome.ok:
        return Failed(message=outcome.message)
    return Completed(message=f"{outcome.seconds:.1f} s")


@flow(
    name="rlhf-round",
    flow_run_name="round-{round}",
    task_runner=ThreadPoolTaskRunner(max_workers=64),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=False,
)
def rlhf_round(round: str | None = None, folder: str = ".") -> State[Any]:
    """Run one round to its decision.

    Args:
        round: like `r2`; appended to pipeline.yaml if it is not there. None: the last one declared.
        folder: the project's folder.
    """
    with open_session(round, folder) as session:
        session.forward()
        if session.pipeline.resources.gpus:
            _declare_gpus(session.pipeline.resources.gpus)
        session.runner.flow_run_id = str(flow_run.id or "")
        try:
            _run(list(session.stages.values()), session)
        except BaseException:
            session.runner.end_all()
            raise
        failures = session.runner.failures
        if failures:
            return Failed(message="\n".join(outcome.message for outcome in failures))
        if session.anything_to_run:
            tracking.tag_outputs(session.pipeline, session.round, session.folder)
            session.forwarded()
        return Completed(message=_publish(session))


def send_logs() -> None:
    """Let Prefect's server have every line before it is ended."""
    APILogWorker.drain_all(timeout=5)


def _run(plan: list[Stage], session: Session) -> None:
    """Submit every stage behind those it depends on, and wait for all."""
    futures: dict[str, Any] = {}
    for stage in plan:
        before = [futures[name] for name in stage.after]
        named = run_stage.with_options(name=stage.name)  # what its page shows while it waits
        futures[stage.name] = named.submit(stage.name, wait_for=before)  # type: ignore[call-overload]
    for future in futures.values():
        future.wait()


def _publish(session: Session) -> str:
    """Write the round's artifact; returns the verdict."""
    decision = report.read_decision(session.round, session.folder)
    verdict = report.verdict(decision)
    create_markdown_artifact(
        key=f"{session.round.replace('_', '-')}-report",
        markdown=report.markdown(session.pipeline, session.round, session.folder),
        description=verdict,
    )
    return verdict


@contextmanager
def _gpu_slot() -> Iterator[None]:
    from prefect.concurrency.sync import concurrency

    with concurrency("gpu", occupy=1, lease_duration=60, strict=True):
        yield


def _declare_gpus(count: int) -> None:
    """Let Prefect hand out as many GPU slots as the pipeline declares."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name("gpu", count)
