"""Training rows: which are learned from, in what order, and what is refused before training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.training_data import DAY, START, data_spec, put_days, put_table, quiet, snapshot_table, training_run

from trainer.data import DataRefused, Dataset, load_data, load_rows
from trainer.encoders import EncodingRefused
from trainer.spec import RunSpec


def tables(days: int = 4, rows: int = 30) -> list[pa.Table]:
    return [snapshot_table(day, rows) for day in range(days)]


def loaded(store: Path, days: list[pa.Table], valid_days: int = 1) -> Dataset:
    return load_data(spec_of(store, days, valid_days), store, quiet)


def spec_of(store: Path, days: list[pa.Table], valid_days: int = 1) -> RunSpec:
    spec = training_run(store, days=1, rows=1, valid_days=1)
    return replace(spec, data=data_spec(put_days(store, days), len(days), valid_days))


def replaced(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def same(first: Dataset, second: Dataset) -> bool:
    arrays = [
        (getattr(first.train, n), getattr(second.train, n)) for n in ("numeric", "categorical", "target", "row_ids")
    ]
    return first.inputs == second.inputs and all(np.array_equal(a, b) for a, b in arrays)


def test_a_label_unknown_at_the_cut_is_left_out_and_counted_and_no_negative(tmp_path: Path) -> None:
    days = tables()
    cut = START + 4 * DAY
    known = days[3].column("arrived_at").cast(pa.int64()).to_numpy().copy()
    known[:7] = [cut, cut + 1, cut + DAY, cut, cut, cut, cut]
    known[7:] = cut - 1
    days[3] = replaced(days[3], "arrived_at", pa.array(known, pa.timestamp("us", tz="UTC")))
    days[2] = replaced(days[2], "arrived_at", pa.array([None] * 30, pa.timestamp("us", tz="UTC")))
    dataset = loaded(tmp_path, days)
    assert dataset.counts["immature"] == 37
    assert (len(dataset.train), len(dataset.valid)) == (60, 23)
    assert dataset.valid.target.sum() == sum(days[3].column("late").to_pylist()[7:])
    assert dataset.counts["train_positive"] == sum(sum(d.column("late").to_pylist()) for d in days[:2])


def test_rows_observed_at_or_after_the_boundary_validate_whenever_their_label_was_known(tmp_path: Path) -> None:
    days = tables(2)
    boundary = START + DAY
    observed = days[0].column("observed_at").cast(pa.int64()).to_numpy().copy()
    observed[0], observed[1] = boundary, boundary - 1
    days[0] = replaced(days[0], "observed_at", pa.array(observed, pa.timestamp("us", tz="UTC")))
    known = np.full(30, boundary + 5, dtype=np.int64)
    days[0] = replaced(days[0], "arrived_at", pa.array(known, pa.timestamp("us", tz="UTC")))
    rows = load_rows(spec_of(tmp_path, days).rows, tmp_path, quiet, ["flight_id"])
    assert "000-00000" in rows.valid.column("flight_id").to_pylist()
    assert "000-00001" in rows.train.column("flight_id").to_pylist()


def test_rows_stand_in_the_order_of_their_identity_whatever_the_files_were(tmp_path: Path) -> None:
    days = tables()
    straight = loaded(tmp_path, days)
    shuffled = [d.take(np.random.default_rng(i).permutation(len(d))) for i, d in enumerate(days)]
    other = spec_of(tmp_path, shuffled)
    other = replace(other, data=replace(other.rows, files=other.rows.files[::-1]))
    assert same(straight, load_data(other, tmp_path, quiet))


def test_validation_rows_change_nothing_that_is_fitted(tmp_path: Path) -> None:
    days = tables()
    before = loaded(tmp_path, days)
    strange = replaced(days[3], "weather__temp", pa.array([1e9] * 30))
    strange = replaced(strange, "dest", pa.array(["NEW"] * 30))
    strange = replaced(strange, "departure_minute", pa.array([None] * 30, pa.int64()))
    after = loaded(tmp_path, [*days[:3], strange])
    assert same(before, after)
    assert before.reference == after.reference
    assert not np.array_equal(before.valid.numeric, after.valid.numeric)


def test_every_file_and_part_of_the_work_beats(tmp_path: Path) -> None:
    beats: list[int] = []
    load_data(spec_of(tmp_path, tables()), tmp_path, lambda: beats.append(1))
    assert len(beats) >= 4 + 1


def test_an_altered_a_missing_and_a_misnamed_blob_are_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tables())
    file = spec.rows.files[2]
    digits = file.sha256.removeprefix("sha256:")
    path = tmp_path / "sha256" / digits[:2] / digits[2:]
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
    with pytest.raises(DataRefused, match=r"2013-03-03.*digest"):
        load_data(spec, tmp_path, quiet)
    path.unlink()
    with pytest.raises(DataRefused, match=r"2013-03-03.*not in the store"):
        load_data(spec, tmp_path, quiet)
    wrong = replace(file, sha256="../../etc/passwd")
    with pytest.raises(ValueError, match="no digest"):
        load_data(replace(spec, data=replace(spec.rows, files=(wrong,))), tmp_path, quiet)


def test_another_row_count_than_the_spec_says_is_refused(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tables())
    wrong = replace(spec.rows.files[0], rows=29)
    with pytest.raises(DataRefused, match=r"2013-03-01.*30 rows.*29"):
        load_data(replace(spec, data=replace(spec.rows, files=(wrong,))), tmp_path, quiet)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("late", pa.array([2] + [0] * 29), "holds 2.0"),
        ("late", pa.array([None] + [0] * 29, pa.int64()), "no target"),
        ("late", pa.array(["yes"] * 30), "is string"),
        ("observed_at", pa.array([None] * 30, pa.timestamp("us", tz="UTC")), "no observation time"),
        ("observed_at", pa.array([1] * 30), "not a timestamp"),
        ("flight_id", pa.array(["x"] * 30), "'x'.*two rows"),
    ],
)
def test_rows_that_cannot_be_learned_from_are_refused(
    tmp_path: Path, column: str, values: pa.Array, message: str
) -> None:
    with pytest.raises(DataRefused, match=message):
        loaded(tmp_path, [replaced(snapshot_table(0, 30), column, values)], valid_days=0)


def test_a_missing_column_names_the_snapshot(tmp_path: Path) -> None:
    days = tables()
    days[1] = days[1].drop_columns(["plane__seats"])
    with pytest.raises(DataRefused, match=r"2013-03-02.*plane__seats"):
        loaded(tmp_path, days)


def test_columns_of_different_types_are_refused(tmp_path: Path) -> None:
    days = tables()
    days[1] = replaced(days[1], "plane__seats", pa.array(["many"] * 30))
    with pytest.raises(DataRefused, match="different types"):
        loaded(tmp_path, days)


def test_text_among_the_numbers_is_refused_by_name(tmp_path: Path) -> None:
    days = [replaced(d, "plane__seats", pa.array(["many"] * 30)) for d in tables()]
    with pytest.raises(EncodingRefused, match="plane__seats"):
        loaded(tmp_path, days)


def test_a_column_that_is_null_in_one_file_takes_the_type_of_the_others(tmp_path: Path) -> None:
    days = tables()
    days[0] = replaced(days[0], "plane__seats", pa.nulls(30))
    assert loaded(tmp_path, days).inputs.numeric[-1].type == "float64"


def test_no_row_to_train_on_is_refused_with_the_counts(tmp_path: Path) -> None:
    with pytest.raises(DataRefused, match="'train': 0"):
        loaded(tmp_path, tables(2), valid_days=2)


def test_a_window_without_validation_rows_loads(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, tables(2))
    dataset = load_data(replace(spec, data=replace(spec.rows, validation_from=spec.rows.cut - 1)), tmp_path, quiet)
    assert dataset.counts["valid"] == len(dataset.valid) == 0
    assert dataset.valid.numeric.shape == (0, dataset.inputs.numeric_width)


def test_an_identity_of_several_columns_orders_and_may_repeat_in_part(tmp_path: Path) -> None:
    table = snapshot_table(0, 30)
    table = table.append_column("leg", pa.array([i % 2 for i in range(30)]))
    table = replaced(table, "flight_id", pa.array([f"f{i // 2:03d}" for i in range(30)]).dictionary_encode())
    file = put_table(tmp_path, table, "2013-03-01")
    data = replace(data_spec([file], 1, 1), identity=("flight_id", "leg"), validation_from=START)
    rows = load_rows(replace(data, cut=START + 9 * DAY, validation_from=START + 8 * DAY), tmp_path, quiet, ["leg"])
    assert rows.train.column("leg").to_pylist() == [0, 1] * 15
