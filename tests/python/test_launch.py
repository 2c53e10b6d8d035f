# SPDX-License-Identifier: Apache-2.0
"""``sagebwd run``: scripts that know nothing of this library compute attention in INT8, forward and
backward, in all processes below the command and nowhere else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sagebwd.launch import __main__ as launcher

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]
HERE = Path(__file__).parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
SDPA = """
import torch
q = torch.randn(1, 2, 64, 32, requires_grad=True)
torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
"""


def run(*command, options=(), status=0, env=ENV, cwd=None):
    """(stdout, stderr) of a command below ``sagebwd run``."""
    program = [sys.executable, "-m", "sagebwd.launch", *options, "--", *map(str, command)]
    done = subprocess.run(program, capture_output=True, text=True, env=env, cwd=cwd, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def python(code, **options):
    return run(sys.executable, "-c", code, **options)


def fake_package(place, name, body=""):
    """A package of this name on a path of its own."""
    (place / name).mkdir(parents=True)
    (place / name / "__init__.py").write_text(body)
    return {**ENV, "PYTHONPATH": str(place)}


# --- numbers --------------------------------------------------------------------------------------


def test_call_sites_of_trainers():
    out, seen = run(sys.executable, HERE / "call_sites.py")
    sites = json.loads(out)
    assert len(sites) == 15
    for name, (o, dq, dk, dv) in sites.items():
        assert 1e-3 < o < 0.02 and 1e-3 < dv < 0.02, f"{name}: {o} {dv}"
        assert 1e-3 < dq < 0.03 and 1e-3 < dk < 0.03, f"{name}: {dq} {dk}"
    for count in ("sdpa: 3 calls", "flash_attn: 8 calls", "sageattention: 5 calls"):
        assert count in seen


MODEL = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=2)
config._attn_implementation = sys.argv[1]
model = LlamaForCausalLM(config)
tokens = torch.arange(2 * 48).view(2, 48) % 61
mask = torch.ones_like(tokens)
mask[1, 40:] = 0
out = model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
out.loss.backward()
json.dump([model.config._attn_implementation,
           model.model.layers[0].self_attn.q_proj.weight.grad.flatten().tolist()], sys.stdout)
"""


@pytest.mark.long
def test_llama_factory_asks_for_flash_attention_2(tmp_path):
    """With padding. transformers' own flash_attention_2 would need a GPU."""
    import torch

    script = tmp_path / "model.py"
    script.write_text(MODEL)
    name, got = json.loads(run(sys.executable, script, "flash_attention_2")[0])
    plain = subprocess.run([sys.executable, script, "eager"], capture_output=True, env=ENV)
    other, want = json.loads(plain.stdout)
    assert (name, other) == ("sagebwd", "eager")
    got, want = torch.tensor(got), torch.tensor(want)
    assert 1e-4 < (got - want).norm() / want.norm() < 0.05


def test_an_implementation_that_is_named_otherwise_stays(tmp_path):
    script = tmp_path / "model.py"
    script.write_text(MODEL)
    out, seen = run(sys.executable, script, "eager")
    assert json.loads(out)[0] == "eager"
    assert "the script asks for attn_implementation='eager'" in seen and "NOTHING ran" in seen


def test_documents_numbered_in_the_mask_are_refused():
    code = """
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
import transformers.modeling_flash_attention_utils as utils
utils._get_unpad_data = lambda mask: None
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
                                     num_hidden_layers=1, num_attention_heads=2))
model(torch.zeros(1, 16, dtype=torch.long))
"""
    _, seen = python(code, status=1)
    assert "NotImplementedError: sagebwd: the script has replaced transformers' _get_unp" in seen


@pytest.mark.long
def test_layers_that_fall_back_are_counted_as_such():
    code = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=2, attention_dropout=.1)).train()
model(torch.zeros(1, 16, dtype=torch.long)).logits.sum().backward()
model.eval()(torch.zeros(1, 16, dtype=torch.long))
"""
    _, seen = python(code, options=["--as", "transformers"])
    assert "transformers: 2 calls ran here\n    elsewhere, 2 calls: attention dropout 0.1" in seen
    _, seen = python(code, options=["--as", "transformers", "--strict"], status=1)
    assert "Unsupported: sagebwd: attention dropout 0.1" in seen


def test_diffusers():
    code = """
import torch
from diffusers import WanTransformer3DModel as Wan
from diffusers import DiTTransformer2DModel as DiT
wan = Wan(num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
          freq_dim=16, ffn_dim=64, num_layers=2)
out = wan(torch.randn(1, 4, 3, 16, 16), torch.tensor([500]), torch.randn(1, 8, 16)).sample
out.sum().backward()
dit = DiT(num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8)
dit(torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.tensor([1])).sample.sum().backward()
"""
    _, seen = python(code, options=["--as", "diffusers"])
    assert "diffusers: 6 calls ran here" in seen and "elsewhere" not in seen


def test_compiled_code():
    code = """
import torch
from flash_attn import flash_attn_func
q = torch.randn(1, 64, 2, 32, requires_grad=True)
torch.compile(flash_attn_func, backend="eager", fullgraph=True)(q, q, q).sum().backward()
"""
    assert "flash_attn: 1 calls ran here" in python(code)[1]


# --- processes ------------------------------------------------------------------------------------


def test_children_of_launchers_and_workers(tmp_path):
    """Two ranks of torchrun, each with two workers that read data and one spawned process."""
    script = tmp_path / "train.py"
    script.write_text(f"""
import multiprocessing, torch
def more():
    {SDPA.strip().replace(chr(10), chr(10) + "    ")}
if __name__ == "__main__":
    for x in torch.utils.data.DataLoader(torch.zeros(4), num_workers=2):
        more()
    for kind in ("spawn", "fork"):
        process = multiprocessing.get_context(kind).Process(target=more)
        process.start()
        process.join()
        assert process.exitcode == 0
""")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    _, seen = run(sys.executable, *torchrun, script)
    assert "6 computed INT8 attention" in seen  # and torchrun itself and PyTorch's helpers did not
    assert "sdpa: 12 calls ran here" in seen
    assert "missing here" not in seen


def test_nothing_outside_changes(tmp_path):
    inside = python("import flash_attn; print(flash_attn.__version__)")[0]
    assert inside == "2.8.3+sagebwd\n"
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('flash_attn') is not None)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


@pytest.mark.long
def test_versions_say_who_computes():
    code = "from importlib.metadata import version as v; print(v('flash-attn'), v('sageattention'))"
    assert python(code)[0] == "2.8.3+sagebwd 2.2.0+sagebwd\n"
    code = "from diffusers.utils import is_flash_attn_available as a; print(a())"
    assert python(code)[0] == "True\n"


@pytest.mark.long
def test_an_installed_package_stays_unless_it_is_named(tmp_path):
    env = fake_package(tmp_path, "flash_attn", "__version__ = 'real'")
    code = "import torch, flash_attn; print(flash_attn.__version__)"
    out, seen = python(code, env=env)
    assert out == "real\n"
    assert "flash_attn is installed and was left alone; --as flash_attn" in seen
    assert "whose calls are not seen here: flash_attn" in seen
    out, seen = python(code, env=env, options=["--as", "flash_attn"])
    assert out == "2.8.3+sagebwd\n" and "a stand-in took its place" in seen


def test_only_what_is_named():
    names = "('flash_attn', 'sageattention')"
    code = f"import importlib.util as u, torch; print(*map(u.find_spec, {names}))"
    assert python(code, options=["--as", "sdpa"])[0] == "None None\n"


def test_the_own_sitecustomize_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = 1")
    env = {**ENV, "PYTHONPATH": str(tmp_path)}
    _, seen = python("import sys; print(mine, sys.modules['sitecustomize'])" + SDPA, env=env)
    assert "sdpa: 1 calls ran here" in seen


def test_the_recipe_reaches_every_replaced_attention():
    code = """
import flash_attn, sageattention, sagebwd, torch
import torch.nn.functional as F
q, k, v = (torch.randn(1, 40, 2, 32) for _ in range(3))
turned = [t.transpose(1, 2) for t in (q, k, v)]
want = sagebwd.attention(q, k, v, recipe="vectorwise rotate=off")
assert not torch.equal(want, sagebwd.attention(q, k, v))
assert torch.equal(F.scaled_dot_product_attention(*turned).transpose(1, 2), want)
assert torch.equal(flash_attn.flash_attn_func(q, k, v), want)
assert torch.equal(sageattention.sageattn(q, k, v, "NHD"), want)
kernel = sageattention.sageattn_qk_int8_pv_fp16_cuda
assert torch.equal(kernel(q, k, v, "NHD", pv_accum_dtype="fp32"), want)
import transformers
from transformers import AttentionInterface
ours = AttentionInterface()["sagebwd"]
module = torch.nn.Module()
module.is_causal = False
assert torch.equal(ours(module, *turned, None, is_causal=False)[0], want)
"""
    _, seen = python(code, options=["--recipe", "vectorwise rotate=off"])
    assert "2 processes" not in seen and "sageattention: 2 calls" in seen


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.long
def test_status_and_strictness():
    assert "imported PyTorch" in python("import sys; sys.exit(7)", status=7)[1]
    _, seen = python("import torch", options=["--strict"], status=3)
    assert "NOTHING ran in INT8" in seen
    dropout = SDPA.replace("q, q, q)", "q, q, q, dropout_p=.1)")
    _, seen = python(dropout)
    assert "sdpa: 0 calls ran here\n    elsewhere, 1 calls: dropout" in seen
    _, seen = python(dropout, options=["--strict"], status=1)
    assert "NotImplementedError" in seen and "refused, 1 calls: dropout" in seen
    python(SDPA, options=["--strict"])


def test_a_killed_process_is_named():
    _, seen = python(SDPA + "import os; os._exit(0)")
    assert "1 processes were killed or left by os._exit" in seen


def test_processes_that_cannot_be_reached(capsys):
    assert "No process reported" in run("env", "-i", sys.executable, "-c", "1")[1]
    for flag in ("-I", "-E", "-uS"):
        with pytest.raises(SystemExit):
            launcher.parsed(["--", "python3", flag, "train.py"])
        assert f"python3 {flag} reads no PYTHONPATH" in capsys.readouterr().err
    for command in (["python", "train.py", "-I"], ["python", "-m", "x", "-S"], ["torchrun", "-E"]):
        assert launcher.parsed(["--", *command]).command == command


@pytest.mark.parametrize("argv, what", [
    ([], "expected a command"), (["--as", "xformers", "--", "python"], "got 'xformers'"),
    (["--as", "", "--", "python"], "--as: expected"),
    (["--recipe", "vectorwize", "--", "python"], "did you mean 'vectorwise'"),
    (["--recipe", "", "--", "python"], "--recipe: expected vectorwise"),
])  # fmt: skip
def test_refused_arguments(argv, what, capsys):
    with pytest.raises(SystemExit):
        launcher.parsed(argv)
    assert what in capsys.readouterr().err


def test_a_command_that_does_not_exist():
    assert "no-such-program: No such file" in run("no-such-program", status=1)[1]


def test_stand_in_refuses_what_it_cannot_compute():
    code = """
import torch
from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_func
from sageattention import sageattn
q = torch.randn(1, 16, 2, 32)
for call in (lambda: _flash_attn_forward(q, q, q), lambda: flash_attn_func(q, q, q, .1),
             lambda: flash_attn_func(q, q, q, alibi_slopes=torch.ones(2)),
             lambda: sageattn(q, q, q, dropout_p=.1),
             lambda: sageattn(q, q[:, :1], q[:, :1], "NHD", True)):
    try:
        call()
    except NotImplementedError:
        print("refused")
"""
    assert python(code)[0] == "refused\n" * 5


def test_metadata_of_stand_ins():
    code = """
import importlib.metadata as m
print(m.packages_distributions()["flash_attn"], m.metadata("flash_attn")["Name"])
"""
    assert python(code)[0] == "['flash-attn'] flash-attn\n"
    code = "import importlib.metadata as m; print('flash_attn' in m.packages_distributions())"
    assert python(code, options=["--as", "sdpa"])[0] == "False\n"
