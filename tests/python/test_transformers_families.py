# SPDX-License-Identifier: Apache-2.0
"""A family of transformers for each way a mask reaches attention, and the table of all."""

import collections
import pathlib
import re

import pytest

transformers = pytest.importorskip("transformers")

import transformers_families as families  # noqa: E402

pytestmark = pytest.mark.cpu_only
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "transformers.md"

EXPECTED = {
    "llama": "works",  # grouped queries, full attention
    "gemma3_text": "works",  # windows and full attention, a cache for each
    "gpt_oss": "works",  # sinks
    "deepseek_v3": "works",  # values of another head dim
    "llama4_text": "works",  # chunks
    "bamba": "works",  # attention in some layers
    "whisper": "works",  # cross-attention over sound
    "m2m_100": "works",  # cross-attention over padded text
    "bert": "works",
    "modernbert": "works",  # windows both ways
    "clip": "works",  # a text and a vision tower
    "t5": "refuses",  # a bias
    "gemma2": "works",  # soft capping, windows
    "git": "refuses",  # reads its mask
    "bloom": "no effect",  # attention code of its own
}


@pytest.mark.parametrize("family", EXPECTED)
def test_family(family):
    result = families.try_family(family)
    assert result["verdict"] == EXPECTED[family], result
    happened = [what.split(":")[0] for what in result["cases"].values()]
    if EXPECTED[family] == "refuses":
        assert set(happened) <= {"refused", "eager fails"}, result


def rows():
    text = DOCS.read_text().split("<!-- begin families -->")[1]
    return text, re.findall(r"^\| ([\w.-]+) \| (\w*) \| ([a-z ]+) \|", text, re.M)


def test_the_table_is_of_these_families():
    text, table = rows()
    assert re.search(r"^transformers \d+\.\d+\S*, torch \d+\.\d+", text, re.M)
    verdicts = {family: verdict for family, _, verdict in table}
    assert len(verdicts) > 500
    assert "wrong" not in verdicts.values()
    for family, verdict in EXPECTED.items():
        assert verdicts[family] == verdict
    del verdicts["family"]  # the head of the table
    for verdict, count in collections.Counter(verdicts.values()).items():
        assert f"| {verdict} | {count} |" in text
