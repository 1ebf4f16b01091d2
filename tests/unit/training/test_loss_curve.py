"""Judgements of a run as rows: several in one epoch stay apart, one made again counts as it was made last."""

from types import SimpleNamespace
from typing import Any

from headway.training.describe import event_line, loss_curve


def event(seq: int, **data: object) -> Any:  # noqa: ANN401 - what the catalog gives
    return SimpleNamespace(
        seq=seq, kind="epoch", attempt=1, node=0, data={"train_loss": 2.0, "valid_loss": 1.0, **data}
    )


def curve(*events: Any) -> list[tuple[int, int, float]]:  # noqa: ANN401
    catalog = SimpleNamespace(run_events=lambda *_, after, **__: [e for e in events if e.seq > after])
    services: Any = SimpleNamespace(catalog=catalog, principal=None)
    run: Any = SimpleNamespace(run_id="a")
    return [(row.epoch, row.step, row.valid_loss) for row in loss_curve(services, run)]


def test_judgements_by_step_stay_apart_and_the_last_of_each_counts() -> None:
    told = [
        event(1, epoch=1, step=10),
        event(2, epoch=1, step=20, valid_loss=0.9),
        event(3, epoch=1, step=20, valid_loss=0.8),
        event(4, epoch=2, step=30, valid_loss=0.7),
    ]
    assert curve(*told) == [(1, 10, 1.0), (1, 20, 0.8), (2, 30, 0.7)]


def test_runs_from_before_are_read_by_epoch() -> None:
    assert curve(event(1, epoch=1), event(2, epoch=2), event(3, epoch=1, valid_loss=0.5)) == [(1, 0, 0.5), (2, 0, 1.0)]


def test_the_words_say_what_there_is() -> None:
    line = event_line(event(1, epoch=1, step=10, best=True))
    assert line.endswith("epoch 1 step 10: train loss 2.0000, validation loss 1.0000  best so far")
    assert "epoch 1: train" in event_line(event(1, epoch=1))
    assert event_line(event(1, epoch=1, valid_auc=0.7)).endswith("validation loss 1.0000, AUC 0.7000")
