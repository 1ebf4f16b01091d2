"""The commands of a chaos run, each repeated until it is acknowledged, as whoever asked for it would."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.schedule import Step
from chaos.world import AS_OF, DAYS, WAIT_S, World

LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
BACKFILL = """mutation($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) {
  __typename ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
OPEN = """query { runsOrError(filter: {statuses: [QUEUED, NOT_STARTED, STARTING, STARTED, CANCELING]}) {
  ... on Runs { results { runId status } } } }"""
CLOSE = """mutation($id: String!) { terminateRun(runId: $id, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) {
  __typename } }"""
DATASET, SNAPSHOT = ["pipeline", "dataset_version", "labels"], ["pipeline", "feature_snapshot"]
TRAINING = ["shop", "training_run"]
ASKED_AT = "2026-05-10T12:00:00+00:00"
_AGAIN_S = 0.5


class NotAcknowledged(AssertionError):
    """A command that was repeated for minutes and never acknowledged."""


@dataclass
class Workload:
    """What was asked and what was acknowledged, over all seeds of a world."""

    world: World
    delivered: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DAYS, 0))
    trained: set[int] = field(default_factory=set[int])
    stable: int = 1
    epoch: int = 1
    answers: list[str] = field(default_factory=list[str])
    labels: dict[str, str] = field(default_factory=dict[str, str])

    def perform(self, seed: int, step: Step) -> None:
        """Do a step's command until it is acknowledged.

        Raises:
            NotAcknowledged: it never was.
        """
        number = seed * 1_000 + step.number
        day = DAYS[number % len(DAYS)]
        commands: dict[str, Callable[[], None]] = {
            "materialize": lambda: self._materialize(day),
            "backfill": self.backfill,
            "train": lambda: self.train(number),
            "promote": self._promote,
            "predict": lambda: self._predict(number),
            "label": lambda: self._label(number),
        }
        commands[step.operation]()

    def materialize(self, day: str) -> None:
        """Ask for a day's version and snapshot."""
        self._launch([DATASET, SNAPSHOT], day, {})

    def backfill(self) -> None:
        """Ask for every day."""
        params = {"assetSelection": [{"path": p} for p in (DATASET, SNAPSHOT)], "partitionNames": list(DAYS)}
        self._graphql(BACKFILL, "LaunchBackfillSuccess", params={**params, "tags": []})

    def train(self, seed: int) -> None:
        """Ask for a training that nobody asked for before."""
        self._launch([TRAINING], AS_OF, {"ops": {"shop__training_run": {"config": {"seed": seed}}}})
        self.trained.add(seed)

    def in_flight(self) -> list[str]:
        """Dagster runs that go on, after those were closed whose worker is gone."""
        found = self._asked(OPEN)["runsOrError"]["results"]
        if not self.world.workers():
            for run in (r for r in found if r["status"] in ("STARTED", "CANCELING")):
                self._asked(CLOSE, id=run["runId"])
        return [r["runId"] for r in found]

    def _materialize(self, day: str) -> None:
        """A delivery with one more row, and the ask."""
        self.delivered[day] += 1
        file = self.world.days.folder / "labels.csv"
        number = self.delivered[day]
        new = file.with_suffix(".new")
        new.write_text(file.read_text() + f"{day}-more{number},{day}T20:{number % 60:02d}:00Z,p1,{number}\n")
        new.rename(file)
        self.materialize(day)

    def _promote(self) -> None:
        wanted = 3 - self.stable
        last = repeated(lambda: self.world.bench.run("promote", f"shop@{wanted}"), lambda r: r.exit_code == 0)
        assert last.exit_code == 0
        self.stable, self.epoch = wanted, self.epoch + 1

    def _predict(self, number: int) -> None:
        """Three requests; every id that came back was acknowledged."""
        for place in range(3):
            inputs = {"person": f"p{(number + place) % 12}", "shop": f"s{place}", "asked_at": ASKED_AT}
            tensors = [{"name": n, "shape": [1], "datatype": "BYTES", "data": [v]} for n, v in inputs.items()]
            answer = self._posted("/v2/models/shop/infer", {"inputs": tensors})
            self.answers += answer["parameters"]["prediction_ids"]

    def _label(self, number: int) -> None:
        if not self.answers:
            self._predict(number)
        prediction = self.answers[number % len(self.answers)]
        item = {"prediction_id": prediction, "value": 1, "source_id": prediction}
        answer = self._posted("/v2/labels", {"labels": [item]}, lambda a: "label_id" in a["results"][0])
        self.labels[prediction] = answer["results"][0]["label_id"]

    def _launch(self, assets: list[list[str]], partition: str, config: dict[str, Any]) -> None:
        params = {
            "selector": {
                "jobName": "__ASSET_JOB",
                "repositoryName": "__repository__",
                "repositoryLocationName": "chaos",
                "assetSelection": [{"path": path} for path in assets],
            },
            "executionMetadata": {"tags": [{"key": "dagster/partition", "value": partition}]},
            "runConfigData": config,
        }
        self._graphql(LAUNCH, "LaunchRunSuccess", params=params)

    def _graphql(self, query: str, good: str, **variables: Any) -> None:  # noqa: ANN401
        self._asked(query, lambda data: next(iter(data.values()))["__typename"] == good, **variables)

    def _asked(
        self,
        query: str,
        good: Callable[[Any], bool] = lambda data: True,
        **variables: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        body = {"query": query, "variables": variables}
        whole = _acknowledged(
            lambda: _post(f"{self.world.url}/graphql", body), lambda a: "errors" not in a and good(a["data"])
        )
        return whole["data"]

    def _posted(self, path: str, body: Any, good: Callable[[Any], bool] = lambda answer: True) -> Any:  # noqa: ANN401
        return _acknowledged(lambda: _post(self.world.server_url + path, body), good)


def _post(url: str, body: Any) -> Any:  # noqa: ANN401
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def _acknowledged(ask: Callable[[], Any], good: Callable[[Any], bool]) -> Any:  # noqa: ANN401
    """What was answered in the end; a refusal or a part that is away is asked again, until it is not."""
    said = ""

    def once() -> Any:  # noqa: ANN401
        nonlocal said
        try:
            answer = ask()
        except urllib.error.HTTPError as error:
            said = f"{error.code} {error.read()[:500]!r}"
        except (urllib.error.URLError, TimeoutError, ConnectionError, json.JSONDecodeError, OSError) as error:
            said = repr(error)
        else:
            said = f"{answer!r:.800}"
            return answer if good(answer) else None
        return None

    return repeated(once, lambda answer: answer is not None, lambda: said)


def repeated(ask: Callable[[], Any], good: Callable[[Any], bool], said: Callable[[], str] | None = None) -> Any:  # noqa: ANN401
    """Ask until the answer is good.

    Raises:
        NotAcknowledged: it was not within minutes.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        answer = ask()
        if good(answer):
            return answer
        if time.monotonic() > deadline:
            raise NotAcknowledged(said() if said else f"{getattr(answer, 'output', answer)}")
        time.sleep(_AGAIN_S)


def held_file(world: World) -> Path:
    """While it is there, toy ranks keep stepping."""
    return world.bench.home / "runs" / "default" / "hold"
