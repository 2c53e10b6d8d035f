# SPDX-License-Identifier: Apache-2.0
"""The repository for HF Kernels: it is loaded as `kernels` does, beside the installed package, and
transformers trains with it by its name."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sagebwd
from reference import grads_of, qkv, rel

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.cpu_only]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The layout for the CPU; compilers go through ccache where there is one."""
    if not all(map(shutil.which, ("cmake", "ninja", "g++"))):
        pytest.skip("needs cmake, ninja and g++")
    place = tmp_path_factory.mktemp("hub")
    build = (
        f'. tools/setup/ccache.sh; exec "{sys.executable}" tools/package/kernel.py cpu "{place}"'
    )
    done = subprocess.run(["bash", "-c", build], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.fixture(scope="module")
def kernel(repository):
    """As `kernels` imports it: under the id of the metadata, from a path."""
    (variant,) = (repository / "build").iterdir()
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_results_are_those_of_the_package(kernel):
    tensors = qkv(s=70, hk=1)
    call = lambda module: lambda *t: module.attention(*t, layout="bhsd", causal=True)
    for ours, theirs in zip(grads_of(call(kernel), *tensors), grads_of(call(sagebwd), *tensors)):
        assert torch.equal(ours, theirs)
    assert kernel._ops.attention.FORWARD is not sagebwd._ops.attention.FORWARD


def test_old_linux_can_load_it(repository):
    """No symbol is newer than manylinux_2_28 allows, and no library is named by its place."""
    (lib,) = (repository / "build").glob("*/lib")
    newest = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    for path in lib.iterdir():
        text = subprocess.run(["readelf", "-W", "-V", "-d", path], capture_output=True, text=True)
        for kind, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text.stdout):
            assert tuple(map(int, number.split("."))) <= newest[kind], (path.name, kind, number)
        assert "libsagebwd.so" not in text.stdout, "the installed package has that name"
        assert os.fsencode(str(ROOT)) not in path.read_bytes()


def test_transformers_takes_it_by_name(kernel, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *a, **k: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **options: kernel)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(2 * 48).view(2, 48) % 61
    mask = torch.ones_like(tokens)
    mask[1, 40:] = 0

    def gradients(name):
        model.set_attn_implementation(name)
        model.zero_grad()
        labels = tokens.masked_fill(mask == 0, -100)
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    want = gradients("eager")
    assert 1e-4 < rel(gradients("someone/sagebwd"), want) < 0.03


def test_kernels_accepts_it(repository):
    """In a process of its own: the package `kernels` may not be installed here."""
    pytest.importorskip("kernels")
    code = f"""
import torch
from pathlib import Path
from kernels import get_local_kernel
from kernels._rust import Build
assert len(Build.open(Path({str(repository)!r})).general.backends) == 2
kernel = get_local_kernel(Path({str(repository)!r}), backend="cpu")
q = torch.randn(1, 32, 2, 32, requires_grad=True)
kernel.flash_attn_func(q, q, q, causal=True).sum().backward()
assert q.grad.isfinite().all()
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
