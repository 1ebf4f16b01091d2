"""The generated `dagster.yaml`: written once, whole, and without secrets."""

import multiprocessing
from pathlib import Path

import yaml

from headway.home import Settings, load_settings, write_dagster_instance

PG_URL = "postgresql+psycopg2://ada:s3cret@127.0.0.1:5432/dagster"


def settings_in(home: Path, **more: str) -> Settings:
    return load_settings({"HEADWAY_HOME": str(home), **more})


def write_often(home: Path) -> None:
    for url in ("", PG_URL) * 20:
        write_dagster_instance(settings_in(home, HEADWAY_DAGSTER_DATABASE_URL=url))


def test_the_folder_is_absolute_and_holds_the_file(tmp_path: Path) -> None:
    folder = write_dagster_instance(settings_in(tmp_path / "home"))
    assert folder == tmp_path / "home" / "dagster"
    instance = yaml.safe_load((folder / "dagster.yaml").read_text())
    assert instance["telemetry"] == {"enabled": False}
    assert instance["run_monitoring"]["max_resume_run_attempts"] == 0
    assert "storage" not in instance


def test_a_second_writing_leaves_the_file_alone(tmp_path: Path) -> None:
    file = write_dagster_instance(settings_in(tmp_path)) / "dagster.yaml"
    before = file.stat()
    write_dagster_instance(settings_in(tmp_path))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_an_edited_file_is_written_again(tmp_path: Path) -> None:
    file = write_dagster_instance(settings_in(tmp_path)) / "dagster.yaml"
    text = file.read_text()
    file.write_text("telemetry: {enabled: true}\n")
    write_dagster_instance(settings_in(tmp_path))
    assert file.read_text() == text


def test_postgres_is_named_by_variable_and_the_password_stays_out(tmp_path: Path) -> None:
    folder = write_dagster_instance(settings_in(tmp_path, HEADWAY_DAGSTER_DATABASE_URL=PG_URL))
    text = (folder / "dagster.yaml").read_text()
    assert "s3cret" not in text
    storage = yaml.safe_load(text)["storage"]
    assert storage == {"postgres": {"postgres_url": {"env": "HEADWAY_DAGSTER_DATABASE_URL"}}}


def test_what_a_killed_writer_left_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "dagster"
    folder.mkdir()
    (folder / "dagster.yaml.new").write_text("telem")
    write_dagster_instance(settings_in(tmp_path))
    assert not (folder / "dagster.yaml.new").exists()
    assert yaml.safe_load((folder / "dagster.yaml").read_text())["telemetry"] == {"enabled": False}


def test_a_reader_never_sees_half_a_file_while_others_write(tmp_path: Path) -> None:
    file = write_dagster_instance(settings_in(tmp_path)) / "dagster.yaml"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert file.read_text().endswith("}\n")
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
