"""The README's commands and code run, and print what it shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.printed import assert_same_output

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_decides_is_read_in_one_minute() -> None:
    assert len(README.split("\n## How it works")[0].splitlines()) <= 45


def test_the_python_lines_print_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```python\n(.*?)```\n```\n(.*?)```", README, re.DOTALL)
    assert block is not None
    code, shown = block.groups()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "README.md", "exec"), {})
    assert_same_output(output.getvalue(), shown, tolerance=5e-3)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (ROOT / link).exists()
