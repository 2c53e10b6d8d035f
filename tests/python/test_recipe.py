# SPDX-License-Identifier: Apache-2.0
"""Recipes as objects: copies, pickles, and those that older versions wrote."""

import copy
import pickle

import pytest

import sagebwd
from sagebwd.recipe import without_removed


def test_copies_and_pickles_are_equal():
    recipe = sagebwd.Recipe.paper(smooth_v=True, high_precision=("O",), seed=3)
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe


@pytest.mark.parametrize(
    "old", [dict(), dict(pv16_tiles=0, p_levels=0), dict(scheme="paper", p_levels=127)], ids=str
)
def test_a_pickle_of_an_older_version_loads(old):
    recipe = object.__new__(sagebwd.Recipe)
    recipe.__setstate__(old)
    assert recipe == sagebwd.Recipe(scheme=old.get("scheme", "vectorwise"))
    assert sagebwd.Recipe(**without_removed(old)) == recipe


@pytest.mark.parametrize(
    "old, words",
    [
        (dict(pv16_tiles=-1), r"pv16_tiles=-1 .*high_precision=\('O',\)"),
        (dict(pv16_tiles=1), "pv16_tiles=1 .*lead= of block lists"),
        (dict(p_levels=127), "p_levels=127 is no longer"),
        (dict(scheme="paper", p_levels=255), "p_levels=255 is no longer"),
        (dict(smooth_p=True), "expected a pickle"),
        ("vectorwise", "expected a pickle"),
    ],
    ids=str,
)
def test_a_pickle_that_would_mean_other_numbers_is_refused(old, words):
    with pytest.raises(ValueError, match=words):
        object.__new__(sagebwd.Recipe).__setstate__(old)
