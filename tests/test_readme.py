"""What the README says is so."""

import re
import subprocess
import sys

from helpers.paths import ROOT

from architectures_mote import ARCHITECTURES

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_architectures() -> None:
    listed = README.split("Architectures: ", 1)[1].split(". Others", 1)[0]
    assert re.findall(r"`([\w-]+)`", listed) == list(ARCHITECTURES)


def test_the_first_screen_has_two_commands_that_do_all() -> None:
    commands = [line for line in README.splitlines()[:15] if line.startswith("python3 -m venv .venv && ")]
    assert [command.rsplit(" && ", 1)[1] for command in commands] == [
        ".venv/bin/python examples/quickstart.py",
        ".venv/bin/python -m pytest",
    ]


def test_the_quickstart_finds_what_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "quickstart.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.split("how do whales get oxygen\n", 1)[1].splitlines()
    assert "Whales are mammals" in found[0]
    assert "Inflation" in done.stdout.split("why does everything cost more than last year\n", 1)[1].splitlines()[0]
    assert "largest difference 0.0e+00" in done.stdout
