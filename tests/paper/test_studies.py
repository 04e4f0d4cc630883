"""`vanilla-transformer paper`: output of every study, and the study of the schedule."""

import argparse
import json

import equations
import pytest

from vanilla_transformer.cli import main
from vanilla_transformer.paper import embeddings, positions, schedule, teacher_forcing
from vanilla_transformer.paper.study import Section, markdown_table, text_table, write_study


def test_the_studies_are_listed(capsys):
    assert main(["paper"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split() == ["name", "in", "the", "paper", "subject"]
    assert [line for line in listed if line.startswith("schedule ")]


def test_an_unknown_study_is_named_with_the_closest_one(capsys):
    assert main(["paper", "schedul"]) == 1
    error = capsys.readouterr().err
    assert "a study of the paper, got 'schedul'. Did you mean 'schedule'?" in error


def test_numbers_are_right_aligned_and_texts_left_aligned():
    rows = [["a", 1234567, 0.123456], ["long name", 1, None]]
    assert text_table(["row", "count", "share"], rows).splitlines() == [
        "row            count   share",
        "a          1,234,567  0.1235",
        "long name          1",
    ]
    assert markdown_table(["row", "a|b", "share"], rows).splitlines() == [
        "| row | a\\|b | share |",
        "| --- | --: | --: |",
        "| a | 1,234,567 | 0.1235 |",
        "| long name | 1 |  |",
    ]


def test_a_study_is_written_as_a_page_and_its_numbers(tmp_path):
    sections = [
        Section(
            name="one", title="First", finding="It is so.", columns=["x"], rows=[[float("inf")]]
        ),
        Section(name="two", title="Second", finding="Also.", numbers={"slope": 2.5}),
    ]
    write_study(tmp_path, "A study", sections, {"command": "vanilla-transformer paper a"})
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert page.startswith("# A study\n\n```text\nvanilla-transformer paper a\n```\n\n## First\n")
    written = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    assert written["sections"]["two"]["slope"] == 2.5
    # JSON has no infinity
    assert written["sections"]["one"]["rows"] == [["inf"]]


def test_pictures_can_be_drawn_into_another_folder(tmp_path, capsys):
    page, pictures = tmp_path / "page", tmp_path / "docs" / "pictures"
    flags = ["--output_dir", str(page), "--pictures_dir", str(pictures)]
    assert main(["paper", "schedule", *flags]) == 0
    assert "](../docs/pictures/schedule.png)" in (page / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in pictures.iterdir()] == ["schedule.png"]
    assert sorted(path.name for path in page.iterdir()) == ["README.md", "study.json"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("file", "pictures_dir must be a folder, got the file"),
        ("", "pictures_dir must not be empty"),
    ],
)
def test_a_folder_for_pictures_is_checked_before_the_study(tmp_path, given, message, capsys):
    (tmp_path / "file").write_text("not a folder")
    pictures = str(tmp_path / given) if given else given
    flags = ["--output_dir", str(tmp_path / "page"), "--pictures_dir", pictures]
    assert main(["paper", "schedule", *flags]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize("study", [embeddings, positions, teacher_forcing])
def test_a_study_takes_the_demo_if_it_exists(study, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def default():
        parser = argparse.ArgumentParser()
        study.add_flags(parser)
        return parser.parse_args([]).model

    assert default() is None
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    assert default() == "runs/demo"


def test_sections_before_an_error_are_kept(tmp_path, capsys, monkeypatch):
    def fail_after_one_section(flags):
        yield Section(name="one", title="First", finding="It is so.")
        raise ValueError("the second section must be there, got none.")

    monkeypatch.setattr(schedule, "sections", fail_after_one_section)
    assert main(["paper", "schedule", "--output_dir", str(tmp_path)]) == 1
    assert "the second section must be there" in capsys.readouterr().err
    written = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    assert list(written["sections"]) == ["one"]


def test_an_invalid_folder_is_refused_before_any_computation(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["paper", "schedule", "--output_dir", str(tmp_path / "file")]) == 1
    printed = capsys.readouterr()
    assert "file" in printed.err
    assert printed.out == ""


def test_an_unknown_recipe_is_refused(tmp_path, capsys):
    command = ["paper", "schedule", "--output_dir", str(tmp_path), "--recipes", "demo", "none"]
    assert main(command) == 1
    assert "got 'none'" in capsys.readouterr().err


def test_the_schedule_is_equation_3(tmp_path, capsys):
    assert main(["paper", "schedule", "--output_dir", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "study.json").read_text(encoding="utf-8"))
    rows = {row[0]: row[1:] for row in written["sections"]["schedule"]["rows"]}
    for recipe, warmup in (("paper-base", 4000), ("paper-big", 4000)):
        d_model, given, factor, last, peak, last_rate = rows[recipe]
        assert (given, factor) == (warmup, 1.0)
        assert peak == pytest.approx(equations.learning_rate(warmup, d_model, warmup))
        assert last_rate == pytest.approx(equations.learning_rate(last, d_model, warmup))
    assert (tmp_path / "schedule.png").stat().st_size > 10_000
    assert "paper-big" in capsys.readouterr().out
