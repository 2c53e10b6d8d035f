# SPDX-License-Identifier: Apache-2.0
"""What a process below ``sagebwd run`` does: it waits for PyTorch and frameworks to be imported,
switches hooks on, and leaves a record. Loaded by its path before anything else, so only modules of
Python itself may be imported at the top."""

import atexit
import importlib.abc
import importlib.util
import json
import os
import sys
from multiprocessing import util as multiprocessing_util

HERE = os.path.dirname(os.path.abspath(__file__))
#: Modules that we stand in for, and what importlib.metadata says of them: the name of the
#: distribution, and as the version the interface and who computes it.
STAND_INS = {
    "flash_attn": ("flash-attn", "2.8.3+sagebwd"),
    "sageattention": ("sageattention", "2.2.0+sagebwd"),
}
#: Attention of other packages, which the summary names if a process has imported it.
OTHERS = ("xformers.ops", "flash_attn", "flash_attn_interface", "sageattention",
          "transformer_engine.pytorch", "flash_attn.cute", "apex.contrib.fmha")  # fmt: skip

settings = {}
reports = {}  # hook: Reports, whose counts add up
notes = []  # sentences for the summary
_stood_in = set()
_torch_seen = False
_is_fork = False


def start():
    """Called once, by sitecustomize."""
    settings.update(json.loads(os.environ["SAGEBWD_RUN"]))
    here = importlib.util.find_spec("sagebwd") is not None
    if not here:
        notes.append(f"sagebwd is not installed for {sys.executable}")
    for name in STAND_INS:
        if name in settings["as"] and here:
            _stand_in(name)
    watch = _Watch()
    sys.meta_path.insert(0, watch)
    atexit.register(write)
    os.register_at_fork(after_in_child=_forked)
    # A forked child of multiprocessing ends without atexit; its own finalizers run.
    multiprocessing_util.register_after_fork(
        watch, lambda _: multiprocessing_util.Finalize(None, write, exitpriority=0)
    )


def _forked():
    """A forked process has a record of its own, if it computes attention."""
    global _is_fork
    _is_fork = True
    for one in (one for made in reports.values() for one in made):
        one.calls = 0
        one.passed_on.clear()
        one.refused.clear()


def report(hook):
    """A Report of this process for the summary."""
    from sagebwd.integrations.report import Report

    made = Report(hook)
    reports.setdefault(hook, []).append(made)
    return made


# --- stand-ins ------------------------------------------------------------------------------------


def _stand_in(name):
    """Puts our module of this name on the path: last, if there is no other, and first if the user
    has named it."""
    place = os.path.join(HERE, "stand_ins", name)
    real = importlib.util.find_spec(name)
    if real is None:
        sys.path.append(place)
    elif name in settings["named"]:
        sys.path.insert(0, place)
        notes.append(f"{name} is installed ({real.origin}); a stand-in took its place")
    else:
        notes.append(f"{name} is installed and was left alone; --as {name} takes its place")
        return
    _stood_in.add(name)


# --- imports --------------------------------------------------------------------------------------


class _Watch(importlib.abc.MetaPathFinder):
    """Calls :func:`imported` after the modules that matter here are imported, and tells
    importlib.metadata of the stand-ins."""

    def find_distributions(self, context=None):
        from importlib import metadata

        class StandIn(metadata.Distribution):
            def __init__(self, module):
                self.module = module

            def read_text(self, filename):
                name, version = STAND_INS[self.module]
                if filename == "METADATA":
                    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                return self.module if filename == "top_level.txt" else None

            def locate_file(self, path):
                return os.path.join(HERE, "stand_ins", self.module, path)

        wanted = getattr(context, "name", None)
        wanted = wanted and wanted.lower().replace("-", "_")
        return [StandIn(module) for module in _stood_in if wanted in (None, module)]

    def find_spec(self, name, path, target=None):
        if not _matters(name):
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, name)
                return spec
        return None


def _matters(name):
    return (
        name in ("torch", "sagebwd", "transformers.modeling_utils")
        or name.startswith("diffusers.models.")
        or name.startswith("diffusers.hooks.")
    )


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, name):
        self._loader, self._name = loader, name

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        imported(self._name)


_done = set()  # modules that are complete


def imported(name):
    global _torch_seen
    _done.add(name)
    try:
        if name == "torch":
            _torch_seen = True
            write(final=False)  # a process that is killed has come this far
            import sagebwd  # noqa: F401  # comes back here; in progress if it has imported PyTorch
        elif name == "sagebwd" and "sdpa" in settings["as"]:
            _sdpa()
        elif name == "transformers.modeling_utils" and "transformers" in settings["as"]:
            _transformers()
        elif name.startswith("diffusers.") and "diffusers" in settings["as"]:
            _diffusers()
    except ImportError as error:
        if settings["strict"]:
            raise
        notes.append(f"{name}: {error}")


def _sdpa():
    from sagebwd.integrations import torch_sdpa

    options = dict(recipe=settings["recipe"], fallback=not settings["strict"])
    reports["sdpa"] = [torch_sdpa.activate(**options)]


def _diffusers():
    """Models of diffusers are modules of their own, which a script imports one after the other."""
    if not {"diffusers.models.attention_dispatch", "diffusers.models.attention_processor"} <= _done:
        return
    from sagebwd.integrations import diffusers

    seen = diffusers.enable(recipe=settings["recipe"], fallback=not settings["strict"])
    reports.setdefault("diffusers", []).append(seen)


def _transformers():
    import torch
    from transformers import AttentionInterface
    from transformers.modeling_utils import PreTrainedModel

    from sagebwd.integrations import transformers

    fallback = None if settings["strict"] else "sdpa"
    name = transformers.register(recipe=settings["recipe"], fallback=fallback)
    seen = report("transformers")
    ours = AttentionInterface()[name]
    choose = PreTrainedModel._check_and_adjust_attn_implementation
    traced_before = torch.compiler.assume_constant_result(_refuse_patched_packing)
    traced_after = torch.compiler.assume_constant_result(lambda: seen.ran())

    def attend(*args, **kwargs):
        tracing = torch.compiler.is_compiling()
        traced_before() if tracing else _refuse_patched_packing()
        out = ours(*args, **kwargs)
        traced_after() if tracing else seen.ran()
        return out

    def adjusted(model, attn_implementation, *args, **kwargs):
        asked = attn_implementation
        if asked in (None, "sdpa", "flash_attention_2", "flash_attention_3"):
            if model.is_backend_compatible():
                return choose(model, name, *args, **kwargs)
            seen.passed_on[f"{type(model).__name__} has attention code of its own"] += 0  # named
        elif asked != name:
            seen.passed_on[f"the script asks for attn_implementation={asked!r}"] += 0
        return choose(model, attn_implementation, *args, **kwargs)

    AttentionInterface.register(name, attend)
    PreTrainedModel._check_and_adjust_attn_implementation = adjusted


def _refuse_patched_packing():
    """Some trainers number the documents of a packed row in the attention mask and replace a
    function of transformers that reads it for FlashAttention. Here such a mask would say no more
    than what is padding, and documents would see each other."""
    module = sys.modules.get("transformers.modeling_flash_attention_utils")
    function = getattr(module, "_get_unpad_data", None)
    if function is not None and function.__module__ != module.__name__:
        raise NotImplementedError(
            "sagebwd: the script has replaced transformers' _get_unpad_data, so documents of a "
            "packed row are numbered in its attention mask, which is not supported: pack with "
            "position_ids, or run --as flash_attn alone"
        )


# --- the record -----------------------------------------------------------------------------------


def write(final=True):
    """One file for each process that has imported PyTorch."""
    if not _torch_seen:
        return
    hooks = {}
    for hook, made in reports.items():
        counts = hooks.setdefault(hook, dict(calls=0, passed_on={}, refused={}))
        for one in made:
            counts["calls"] += one.calls
            for kind in ("passed_on", "refused"):
                for reason, count in getattr(one, kind).items():
                    counts[kind][reason] = counts[kind].get(reason, 0) + count
    if "transformers" in hooks:  # its calls that fell back were counted above, too
        from sagebwd.integrations import transformers

        for reason, count in transformers.fallback_calls().items():
            hooks["transformers"]["passed_on"][reason] = count
            hooks["transformers"]["calls"] -= count
    if _is_fork and not any(counts["calls"] for counts in hooks.values()):
        return  # a worker that reads data
    others = [name for name in OTHERS if name in sys.modules and name not in _stood_in]
    record = dict(
        argv=sys.orig_argv, python=sys.executable, rank=os.environ.get("RANK"), hooks=hooks,
        notes=notes, others=others, final=final,
    )  # fmt: skip
    path = os.path.join(settings["records"], f"{os.getpid()}.json")
    try:
        with open(path + ".part", "w") as file:
            json.dump(record, file)
        os.replace(path + ".part", path)
    except OSError:  # the command has ended before us
        pass
