"""What planted reports come to as evidence: alarms with hysteresis, incidents, labels, gain."""

from collections.abc import Iterator

import pytest
from support.retrain_bench import CHAMPION_AS_OF, WEEKS, pipeline_of, plant, plant_drift, plant_incident, plant_quality
from support.training_bench import TrainingBench

from headway.loading import Pipeline
from headway.monitoring.retrain_evidence import Evidence, gather_evidence
from headway.monitoring.retraining import Champion, Moved
from headway.monitoring.windows import week_bounds
from headway.services import Services

LATER = ("2026-05-11", "2026-05-18", "2026-05-25")


@pytest.fixture
def services(bench: TrainingBench) -> Iterator[Services]:
    with bench.services() as opened:
        yield opened


@pytest.fixture
def shop(bench: TrainingBench) -> Pipeline:
    return pipeline_of(bench)


def seen(services: Services, shop: Pipeline) -> Evidence:
    return gather_evidence(services, shop, Champion(1, CHAMPION_AS_OF))


def drift_state(services: Services, shop: Pipeline) -> str:
    return next((a.state for a in seen(services, shop).alarms if a.kind == "drift"), "none")


def test_an_alarm_outlasts_a_week_near_the_level_and_keeps_what_moved(services: Services, shop: Pipeline) -> None:
    plant_drift(services)
    plant(services, "drift", LATER[0], "none", {"level": 0.8})
    plant(services, "drift", LATER[1], "none", {"level": 0.75})
    (alarm,) = [a for a in seen(services, shop).alarms if a.kind == "drift"]
    assert (alarm.state, alarm.moved) == ("raised", (Moved("by_shop__share_9d", "", "up"),))
    assert alarm.strength == 0.75
    plant(services, "drift", LATER[1], "none", {"level": 0.3})
    plant(services, "drift", LATER[2], "none", {"level": 0.3})
    assert drift_state(services, shop) == "building"


def test_a_part_of_a_week_raises_nothing_and_may_show_an_incident(services: Services, shop: Pipeline) -> None:
    start, end = week_bounds(WEEKS[1])
    plant(services, "drift", WEEKS[0], "drift", {"level": 2.0})
    plant(services, "drift", WEEKS[1], "drift", {"level": 2.0}, made_at=(start + end) // 2)
    assert drift_state(services, shop) == "building"
    plant(services, "drift", WEEKS[1], "data_incident", {"level": None}, made_at=(start + end) // 2)
    incident = seen(services, shop).incident
    assert incident is not None
    assert incident.week == WEEKS[1]


def test_an_incident_lasts_until_a_week_can_be_judged(services: Services, shop: Pipeline) -> None:
    plant_incident(services, WEEKS[1])
    plant(services, "drift", LATER[0], "too_few", {"level": None})
    assert seen(services, shop).incident is not None
    plant(services, "drift", LATER[0], "none", {"level": 0.2})
    assert seen(services, shop).incident is None


def test_a_season_is_told(services: Services, shop: Pipeline) -> None:
    plant(services, "drift", WEEKS[1], "season", {"level": 3.0})
    assert drift_state(services, shop) == "season"


def test_a_loss_that_is_certain_in_enough_weeks_is_an_alarm(services: Services, shop: Pipeline) -> None:
    plant_quality(services, WEEKS[0], auc=0.55)
    assert [a.state for a in seen(services, shop).alarms] == ["building"]
    plant_quality(services, WEEKS[1], auc=0.57)
    found = seen(services, shop)
    (alarm,) = found.alarms
    assert (alarm.kind, alarm.state, alarm.weeks) == ("quality", "raised", WEEKS)
    assert alarm.strength == pytest.approx((0.66 - 0.61) / 0.03)
    assert found.gain is not None
    assert (found.gain.basis, found.gain.auc) == ("realised", pytest.approx(0.10))
    assert found.labels == 300


def test_immature_weeks_give_an_estimate_and_no_label(services: Services, shop: Pipeline) -> None:
    """t8 for the decision: an immature week has no quality number, and its labels do not count."""
    numbers = {"auc": None, "auc_upper": None, "evaluation_auc": 0.66, "labels": 0, "answers": 400}
    plant(services, "quality", WEEKS[0], "immature", numbers | {"estimated_auc": 0.64})
    found = seen(services, shop)
    assert (found.alarms, found.labels) == ((), 0)
    assert found.gain is not None
    assert (found.gain.basis, found.gain.auc) == ("estimated", pytest.approx(0.02))
    plant(services, "quality", WEEKS[0], "immature", numbers | {"estimated_auc": None})
    assert seen(services, shop).gain is None


def test_labels_of_the_champions_own_months_do_not_count(services: Services, shop: Pipeline) -> None:
    plant_quality(services, "2026-02-16")
    plant_quality(services, "2026-03-02")
    assert seen(services, shop).labels == 150
