# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as pasted, its links lead somewhere, and the tables and figures of the
documents are what the records under results/ say."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["tables.py", "figures.py"])
def test_documents_match_records(tool):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_first_example_runs_as_pasted(capsys):
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    assert len(block.splitlines()) <= 8
    exec(compile(block, "README.md", "exec"), {})
    error = float(capsys.readouterr().out.split(":")[1])
    assert 0 < error < 0.03


def test_the_first_screen_is_short():
    before_heading = (ROOT / "README.md").read_text().split("\n## ")[0]
    prose = re.sub(r"```.*?```|<!--.*?-->|^\|.*$", "", before_heading, flags=re.S | re.M)
    assert len(prose.split()) < 250


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))])
def test_links_to_files_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
