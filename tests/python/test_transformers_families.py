# SPDX-License-Identifier: Apache-2.0
"""A family of transformers for each way a mask reaches attention, and the table of all."""

import collections
import pathlib
import re
import warnings

import pytest

transformers = pytest.importorskip("transformers")

import transformers_families as families  # noqa: E402

pytestmark = pytest.mark.cpu_only
DOCS = pathlib.Path(__file__).parents[2] / "docs" / "transformers-families.md"

EXPECTED = {
    "llama": "works",  # grouped queries, full attention
    "gemma3_text": "works",  # windows and full attention, a cache for each
    "gpt_oss": "works",  # sinks
    "bert": "works",
    "qwen3": "works",  # norms of queries and keys
    "deepseek_v3": "works",  # values of another head dim
    "llama4_text": "works",  # chunks
    "bamba": "works",  # attention in some layers
    "whisper": "works",  # cross-attention over sound
    "m2m_100": "works",  # cross-attention over padded text
    "modernbert": "works",  # windows both ways
    "vit": "works",
    "clip": "works",  # a text and a vision tower
    "t5": "refuses",  # a bias
    "gemma2": "works",  # soft capping, windows
    "gemma4_text": "refuses",  # a head dim of 512
    "git": "refuses",  # reads its mask
    "bloom": "no effect",  # attention code of its own
    # as the ones above, and trained as often
    "qwen2": "works",
    "mistral": "works",
    "mixtral": "works",
    "phi3": "works",
    "olmo2": "works",
    "granite": "works",
}
QUICK = ("llama", "gemma3_text", "gpt_oss", "bert")  # in `make check`
ALIKE = ("qwen2", "mistral", "mixtral", "phi3", "olmo2", "granite")  # in `make test-all` alone


def tier(family):
    if family in QUICK:
        return family
    mark = pytest.mark.long if family in ALIKE else pytest.mark.slow
    return pytest.param(family, marks=mark)


def skip_older_t5(result):
    """T5 of older versions keeps its attention when it is told to use another."""
    older = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    if older and result["family"] == "t5" and result["verdict"] == "no effect":
        pytest.skip("set_attn_implementation has no effect here")


@pytest.mark.parametrize("family", map(tier, EXPECTED))
def test_family(family):
    result = families.try_family(family)
    skip_older_t5(result)
    assert result["verdict"] == EXPECTED[family], result
    happened = [what.split(":")[0] for what in result["cases"].values()]
    if EXPECTED[family] == "refuses":
        assert set(happened) <= {"refused", "eager fails"}, result


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "gemma4_text"])
def test_family_that_falls_back(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = families.try_family(family, fallback="sdpa")
    skip_older_t5(result)
    assert result["verdict"] == "works", result


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
