# SPDX-License-Identifier: Apache-2.0
"""Recipes as objects and as texts: copies, pickles, those that older versions wrote. Python has the
fields that src/spec/recipe_fields.h declares."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch

import sagebwd
from sagebwd._ops import attention as ops
from sagebwd.recipe import SCHEMES, without_removed
from sagebwd.recipe_fields import DITHERABLE, FLAGS, MATMULS


def test_copies_and_pickles_are_equal():
    for recipe in (
        sagebwd.Recipe.paper(smooth_q=True, high_precision=("O",), seed=3),
        sagebwd.Recipe(smooth_k=False),
    ):
        assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe


@pytest.mark.parametrize(
    "old",
    [
        dict(),
        dict(pv16_tiles=0, p_levels=0, k_per_token=False, smooth_v=True),
        dict(scheme="paper", p_levels=127, k_per_token=False, smooth_v=False),
    ],
    ids=str,
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
        (dict(k_per_token=True), "k_per_token=True is no longer a switch .*recipe vectorwise"),
        (dict(smooth_v=False), "smooth_v=False is no longer a switch .*leave it out"),
        (dict(scheme="paper", smooth_v=True), "smooth_v=True is no longer a switch .*leave it out"),
        (dict(smooth_v=True, smooth_q=True), "smooth_q: expected False .*Recipe paper has"),
        (
            dict(scheme="rowwise", smooth_v=False),
            "scheme: expected 'vectorwise', which .*'rowwise'",
        ),
        (dict(smooth_p=True), "expected a pickle"),
        ("vectorwise", "expected a pickle"),
    ],
    ids=str,
)
def test_a_pickle_that_would_mean_other_numbers_is_refused(old, words):
    with pytest.raises(ValueError, match=words):
        object.__new__(sagebwd.Recipe).__setstate__(old)


# --- texts, and what the library declares --------------------------------------------------------

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build/bin/sagebwd"


def test_python_and_the_documents_have_the_declared_fields():
    command = [sys.executable, ROOT / "tools/declare.py", "--check", PROGRAM]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout


def _random_recipe(random):
    changes = {name: random.random() < 0.5 for name in FLAGS if random.random() < 0.4}
    if random.random() < 0.3:
        changes["tile_q"] = 64 * random.randrange(5)
    if random.random() < 0.3:
        changes["tile_k"] = 64 * random.randrange(5)
    if random.random() < 0.4:
        names = random.sample(DITHERABLE, random.randrange(1, 5))
        changes["rounding"] = random.choice(["dither", "dither:" + ",".join(names)])
    if random.random() < 0.4:
        changes["high_precision"] = tuple(random.sample(list(MATMULS), random.randrange(8)))
    scheme = random.choice(SCHEMES)
    if scheme == "vectorwise":
        changes.update(smooth_q=False, tile_k=random.choice([0, 64, 128]))
    return getattr(sagebwd.Recipe, scheme)(**changes)


def test_python_and_the_library_read_the_same_texts():
    random = Random(0)
    for _ in range(25):
        recipe = _random_recipe(random)
        text = recipe.text()
        assert sagebwd.Recipe.parse(text).text() == text
        words = text.split()
        random.shuffle(words)
        said = subprocess.run(
            [PROGRAM, "recipe", " ".join(words), "--json"], stdout=subprocess.PIPE, check=True
        )
        found = json.loads(said.stdout)
        assert found["text"] == text
        for name in (*FLAGS, "scheme", "tile_q", "tile_k"):
            assert found["fields"][name] == getattr(recipe, name), (name, text)
        lifted = [name for name in MATMULS if name in recipe.high_precision]
        assert found["fields"]["high_precision"] == lifted


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "got ''"),
        ("Paper", "did you mean 'paper'"),
        ("paper vectorwise", "got 'paper vectorwise'"),
        ("paper smooth_w=on", "did you mean 'smooth_"),
        ("paper smooth_q=1", "expected on or off"),
        ("paper smooth_q=on smooth_q=on", "given twice"),
        ("paper tile=64", "expected tile="),
        ("paper tile=65x64", "tile_q: expected 0 or a multiple of 64"),
        ("paper rounding=diter", "did you mean 'dither'"),
        ("paper lift=dv", "did you mean 'dV'"),
        ("paper seed=3", "got 'seed=3'"),
        ("vectorwise smooth_q=on", "smooth_q: expected False .*Recipe paper has"),
        ("vectorwise smooth_v=on", "smooth_v=on is no longer .*leave it out"),
        ("vectorwise tile=0x192", "tile_k: expected 0, 64 or 128 .*got 192. 0 lets the backend"),
        ("vectorwise k_per_token=on", "k_per_token=on is no longer .*recipe vectorwise"),
        ("rowwise", "expected vectorwise or paper, .*got 'rowwise'"),
        ("vectorwize", "did you mean 'vectorwise'"),
    ],
)
def test_texts_that_are_refused(text, words):
    """By Python, and by the library, whose words are its own."""
    with pytest.raises(ValueError, match=words):
        sagebwd.Recipe.parse(text)
    q = torch.randn(1, 1, 8, 64)
    with pytest.raises(ValueError):
        ops.forward(q, q, q, ops.Options(recipe=text))


def test_calls_take_texts():
    q = torch.randn(1, 64, 2, 64)
    as_text = sagebwd.attention(q, q, q, recipe="paper rotate=on lift=dQ")
    as_object = sagebwd.attention(q, q, q, recipe=sagebwd.Recipe.paper(rotate=True))
    assert torch.equal(as_text, as_object)


@pytest.mark.parametrize(
    "text, suffice",
    [
        ("vectorwise", True),
        ("vectorwise lift=dV,dP rotate=off", True),
        ("vectorwise smooth_k=off rounding=dither", True),
        ("vectorwise lift=O", False),
        ("vectorwise lift=dQ", False),
        ("paper", False),
        ("no recipe", False),
    ],
)
def test_the_library_says_whether_codes_suffice(text, suffice):
    assert ops.codes_suffice(text) is suffice
