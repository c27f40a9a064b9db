from __future__ import annotations

import os
from pathlib import Path

import pytest

from wavetrain.errors import FormatError, InputError
from wavetrain.schedule.files import load, save
from wavetrain.schedule.torch_csv import dump_csv, parse_csv

SCHEDULE = parse_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", name="1f1b")


@pytest.mark.parametrize("name", ["s.csv", "s.json", "S.CSV", "S.Json"])
def test_a_saved_schedule_is_loaded(name: str, tmp_path: Path) -> None:
    save(SCHEDULE, tmp_path / name)
    assert load(str(tmp_path / name)).actions == SCHEDULE.actions
    assert os.listdir(tmp_path) == [name]


def test_a_csv_is_named_after_its_file_and_json_keeps_its_name(tmp_path: Path) -> None:
    save(SCHEDULE, tmp_path / "s.csv")
    save(SCHEDULE, tmp_path / "s.json")
    assert load(tmp_path / "s.csv").name == "s.csv"
    assert load(tmp_path / "s.json") == SCHEDULE


def test_lowered_is_for_csv(tmp_path: Path) -> None:
    save(SCHEDULE, tmp_path / "s.csv", comms=True)
    assert "0SEND_F0" in (tmp_path / "s.csv").read_text()
    assert load(tmp_path / "s.csv").actions == SCHEDULE.actions
    with pytest.raises(InputError, match=r"written to \.csv only"):
        save(SCHEDULE, tmp_path / "s.json", comms=True)


@pytest.mark.parametrize("name", ["s", "s.txt", "s.csv.gz", ".csv"])
def test_another_suffix_names_the_two(name: str, tmp_path: Path) -> None:
    for call in (lambda: load(tmp_path / name), lambda: save(SCHEDULE, tmp_path / name)):
        with pytest.raises(InputError, match=r"\.csv .* or a \.json file"):
            call()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "bytes.csv").write_bytes(b"0F0,0B0\n1F0,\xff\xfe\n")
    bad = {"none.csv": "No such file", "folder.csv": "directory", "bytes.csv": "not UTF-8", "a\0.csv": "null"}
    for name, words in bad.items():
        with pytest.raises(FormatError, match=words) as caught:
            load(tmp_path / name)
        assert name in str(caught.value)
    with pytest.raises(FormatError, match=r"bytes\.csv:2: not UTF-8"):
        load(tmp_path / "bytes.csv")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "huge.csv", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match="larger than 64 MiB"):
        load(tmp_path / "huge.csv")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "s.csv", tmp_path / "folder.csv", tmp_path / "a\0.csv"):
        with pytest.raises(InputError, match="cannot write"):
            save(SCHEDULE, path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.csv"]


def test_missing_folders_are_made(tmp_path: Path) -> None:
    save(SCHEDULE, tmp_path / "new" / "folder" / "s.csv")
    assert load(tmp_path / "new" / "folder" / "s.csv").actions == SCHEDULE.actions


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(SCHEDULE, tmp_path / "s.csv")
    before = (tmp_path / "s.csv").read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(parse_csv("0F0,0B0\n"), tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text() == before
    assert os.listdir(tmp_path) == ["s.csv"]


def test_a_new_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save(SCHEDULE, tmp_path / "s.csv")
    assert (tmp_path / "s.csv").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_links_are_followed_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "real.csv").touch()
    (tmp_path / "link.csv").symlink_to("real.csv")
    save(SCHEDULE, tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert load(tmp_path / "real.csv").actions == SCHEDULE.actions
    os.mkfifo(tmp_path / "pipe.csv")
    reader = os.open(tmp_path / "pipe.csv", os.O_RDONLY | os.O_NONBLOCK)
    try:
        save(SCHEDULE, tmp_path / "pipe.csv")
        assert os.read(reader, 1 << 16).decode() == dump_csv(SCHEDULE)
    finally:
        os.close(reader)
    assert (tmp_path / "pipe.csv").is_fifo()
