"""Made-up worlds for drift: features of entities whose rows are alike, with times where wanted."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headway.monitoring.calibrate import calibrate
from headway.monitoring.drift import DriftPolicy
from headway.monitoring.reference import Column, Reference, Window, numeric_column, reference_of, text_column

DAY = 86_400_000_000
# Monday, 2013-01-07.
START = 1_357_516_800_000_000


def correlated(rng: np.random.Generator, entities: int, rows: int, features: int, rho: float) -> Window:
    """`rows` rows of each entity; within one, values of a feature correlate by `rho`. Every third feature is skewed."""
    entity = np.repeat(np.arange(entities), rows)
    columns: dict[str, Column] = {}
    for number in range(features):
        mine = np.sqrt(rho) * rng.normal(size=entities)[entity] + np.sqrt(1 - rho) * rng.normal(size=len(entity))
        columns[f"f{number}"] = numeric_column(np.exp(mine) if number % 3 == 0 else mine)
    return Window(columns, entity=entity)


def resampled(rng: np.random.Generator, window: Window, entities: int) -> Window:
    """Whole entities drawn with replacement, each draw as an entity of its own."""
    assert window.entity is not None
    of_entity = np.split(np.arange(window.rows), np.flatnonzero(np.diff(window.entity)) + 1)
    drawn = [of_entity[i] for i in rng.integers(len(of_entity), size=entities)]
    again = window.take(np.concatenate(drawn))
    return replace(again, entity=np.repeat(np.arange(entities), [len(d) for d in drawn]))


def calibrated(window: Window, policy: DriftPolicy, *sizes: int, span: int | None = None) -> Reference:
    """A reference made of a window, calibrated for these sizes."""
    made = reference_of(window)
    found = calibrate(made, policy.psi, policy.distance, sizes or (policy.minimum,), span=span, days=policy.days)
    return replace(made, calibration=found)


def numbers(values: NDArray[np.float64]) -> Window:
    """One numeric feature `x`."""
    return Window({"x": numeric_column(values)})


def texts(*values: tuple[str | None, int]) -> Window:
    """One text feature `c`: each value so many times."""
    return Window({"c": text_column([v for v, n in values for _ in range(n)])})
