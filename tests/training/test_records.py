"""What a run notes of how it was started can be typed again."""

import pytest

from compactattn.training.records import describe_command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("results/make.py", "python results/make.py"),
        ("./results/make.py", "python results/make.py"),
        ("{here}/results/make.py", "python results/make.py"),
        ("{here}/my results/make.py", "python 'my results/make.py'"),
        ("{here}/../elsewhere/make.py", "python make.py"),
        ("/usr/lib/make.py", "python make.py"),
        ("/usr/bin/compactattn", "compactattn"),
        ("/usr/lib/compactattn/__main__.py", "python -m compactattn"),
        ("{here}/my__main__.py", "python my__main__.py"),
    ],
)
def test_a_script_is_told_as_it_is_typed_in_the_current_folder(typed, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert describe_command([typed.format(here=tmp_path), "lm", "--row", "a b"]) == f"{told} lm --row 'a b'"


def test_no_arguments_are_no_command():
    assert describe_command([]) == ""
    assert describe_command(["compactattn"]) == "compactattn"
