# SPDX-License-Identifier: Apache-2.0
"""The sagebwd program as a user meets it: exit codes, messages, JSON, pages, captured tensors."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[2]
BINARY = Path(os.environ.get("SAGEBWD_BIN", ROOT / "build" / "bin" / "sagebwd"))
needs_pages = pytest.mark.skipif(
    importlib.util.find_spec("sagebwd") is None, reason="the Python package makes pages"
)
TENSORS = ("O", "dQ", "dK", "dV", "P", "dS", "D")


def run(*args, env=None, check=True):
    assert BINARY.exists(), f"{BINARY} is missing: build the project, or set SAGEBWD_BIN"
    done = subprocess.run(
        [str(BINARY), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "SAGEBWD_PYTHON": sys.executable, **(env or {})},
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def refused(*args, env=None):
    """Runs a command that must fail as a user error, and returns its one line."""
    done = run(*args, env=env, check=False)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("sagebwd: "), done.stderr
    return lines[0]


def check_case(case):
    assert case["recipe"] in ("paper", "vectorwise")
    assert case["sigma"] is None or case["sigma"] > 0
    for name in ("n", "d", "heads", "seed"):
        assert isinstance(case[name], int)
    assert isinstance(case["causal"], bool)
    assert len(case["tile"]) == 2 and all(isinstance(t, int) and t > 0 for t in case["tile"])
    for tensor in TENSORS:
        error = case["tensors"][tensor]
        assert -1 <= error["cos"] <= 1 + 1e-12
        assert error["rel_l2"] >= 0
        assert abs(error["projection"]) <= error["rel_l2"] + 1e-12
        assert {"head", "row", "rel_l2"} <= error["worst_row"].keys()


def capture(path, layers=(None,), heads=2, kv_heads=2, n=96, d=32, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in layers:
        prefix = "" if layer is None else f"layer.{layer}."
        for name in ("q", "k", "v", "dout"):
            h = heads if name in ("q", "dout") else kv_heads
            tensors[prefix + name] = rng.standard_normal((h, n, d)).astype(dtype)
    save_file(tensors, path)
    return tensors


# --- help, version, wrong use


def test_version_and_help():
    header = (ROOT / "include" / "sagebwd" / "version.h").read_text()
    version = header.split('SAGEBWD_VERSION_STRING "')[1].split('"')[0]
    assert run("--version").stdout.strip() == f"sagebwd {version}"
    assert "report" in run("--help").stdout
    for command in ("trace", "report", "bench", "info"):
        text = run(command, "--help").stdout
        assert "Examples:" in text and f"sagebwd {command}" in text


def test_user_errors_are_one_line_and_exit_2(tmp_path):
    assert "subcommand" in refused()
    assert "--frob" in refused("trace", "--frob")
    assert "quick" in refused("info", "h8 quick")
    assert "multiple of hk" in refused("bench", "h8 hk3")
    assert "head dim" in refused("bench", "d12")
    assert "expected gaussian" in refused("trace", "--inputs", "easy")
    assert "vectorwise or paper" in refused("trace", "--recipe", "fp4")
    assert "dX" in refused("trace", "--lift", "dX")
    assert "sigma" in refused("trace", "--sigma", "0", "--n", "64")
    assert "--sigma" in refused("trace", "--sigma", "big")
    assert "tile" in refused("trace", "--n", "64", "--recipe", "paper tile=100x64")
    assert "--dtype" in refused("trace", "--dtype", "f64")
    assert "cpu-scalar" in refused("trace", "--impl", "gpu-magic")
    assert "cannot be opened" in refused("trace", "--from", tmp_path / "missing.safetensors")
    assert "cannot be written" in refused(
        "trace", "--n", "64", "--json", tmp_path / "no" / "such.json"
    )


@pytest.mark.parametrize(
    "command, near",
    [
        (["trac"], "trace"),
        (["rport", "--quick"], "report"),
        (["--verison"], "--version"),
        (["trace", "--sgima", "3"], "--sigma"),
        (["bench", "--rep=3", "n64"], "--reps"),
        (["trace", "--recipe", "vectorwize"], "vectorwise"),
        (["trace", "--inputs", "sinc"], "sink"),
        (["trace", "--impl", "cpu-scaler"], "cpu-scalar"),
        (["trace", "--dtype", "bf61"], "bf16"),
        (["trace", "--recipe", "paper rounding=diter"], "dither"),
        (["recipe", "paper smoothq=on"], "smooth_q"),
        (["trace", "--lift", "dv"], "dV"),
        (["info", "n64 casual"], "causal"),
        (["info", "smoothk=on"], "smooth_k=on"),
        (["bench", "sed3"], "seed3"),
    ],
)
def test_a_slip_of_the_keyboard_gets_a_suggestion(command, near):
    assert f'did you mean "{near}"?' in refused(*command)


def test_what_is_near_to_nothing_gets_no_suggestion():
    for command in (["frobnicate"], ["trace", "--recipe", "fp4"], ["info", "quick"]):
        assert "did you mean" not in refused(*command)


def test_nothing_is_accepted_and_ignored(tmp_path):
    capture(tmp_path / "c.safetensors", n=64)
    for option in (["--n", 128], ["--sigma", 3], ["--inputs", "sink"], ["--case", "h4"]):
        assert option[0] in refused("trace", "--from", tmp_path / "c.safetensors", *option)
    assert "option of its own" in refused("trace", "--case", "n64 paper")
    assert "--quick" in refused("report", "--quick", "--case", "n64")


def test_a_pin_that_cannot_serve_is_a_user_error():
    line = refused("bench", "n64", env={"SAGEBWD_IMPL": "gpu-magic"})
    assert "SAGEBWD_IMPL pins gpu-magic" in line


# --- info


def test_info_explains_the_choice():
    text = run("info", "h4 n256 d64 causal").stdout
    assert "b1 h4 hk4 nq256 nk256 d64 causal" in text
    assert "SAGEBWD_IMPL" in text and "SAGEBWD_THREADS" in text
    assert "GPU" in text
    assert text.count("chosen") == 2
    pinned = run("info", "n64", env={"SAGEBWD_IMPL": "ref"}).stdout
    assert "SAGEBWD_IMPL pins ref" in pinned
    assert 'SAGEBWD_THREADS is "3"' in run("info", env={"SAGEBWD_THREADS": "3"}).stdout


# --- trace


def test_trace_json_and_table(tmp_path):
    out = tmp_path / "t.json"
    done = run(
        "trace", "--sigma", "1,5", "--n", 128, "--d", 32, "--heads", 2, "--causal", "--json", out
    )
    assert done.stderr == ""  # no progress where nobody watches
    record = json.loads(out.read_text())
    assert record["command"].startswith("sagebwd trace --sigma 1,5")
    assert record["version"] and record["date"]
    assert [(c["recipe"], c["sigma"]) for c in record["cases"]] == [
        ("paper", 1),
        ("vectorwise", 1),
        ("paper", 5),
        ("vectorwise", 5),
    ]
    for case in record["cases"]:
        check_case(case)
        assert (case["n"], case["d"], case["heads"], case["causal"]) == (128, 32, 2, True)
        assert case["impl"] and case["inputs"] == "gaussian"
    shown = f"{record['cases'][1]['tensors']['dQ']['rel_l2']:.4f}"
    assert shown in done.stdout


def test_trace_is_reproducible_and_the_seed_matters(tmp_path):
    def cases(*args):
        out = tmp_path / "t.json"
        run(
            "trace",
            "--n",
            96,
            "--d",
            32,
            "--heads",
            1,
            "--inputs",
            "sink,long",
            *args,
            "--json",
            out,
        )
        return json.loads(out.read_text())["cases"]

    assert cases() == cases("--threads", 1)
    assert cases() != cases("--seed", 2)


def test_lifting_a_matmul_lowers_its_error(tmp_path):
    out = tmp_path / "t.json"
    run("trace", "--n", 256, "--heads", 1, "--recipe", "paper", "--lift", "each,all", "--json", out)
    cases = {c["lift"]: c["tensors"] for c in json.loads(out.read_text())["cases"]}
    assert list(cases) == ["", "S", "O", "S'", "dV", "dP", "dQ", "dK", "all"]
    for name in ("dV", "dQ", "dK"):
        assert cases[name][name]["rel_l2"] < 0.6 * cases[""][name]["rel_l2"]
    for tensor in ("O", "dQ", "dK", "dV"):
        assert cases["all"][tensor]["rel_l2"] < 0.004  # bf16 outputs


def test_recipe_switches_reach_the_case(tmp_path):
    out = tmp_path / "t.json"
    run(
        "trace",
        "--n",
        128,
        "--heads",
        1,
        "--recipe",
        "paper tile=64x128 smooth_k=off smooth_q=on rotate=on rounding=dither",
        "--dtype",
        "f16",
        "--json",
        out,
    )
    (case,) = json.loads(out.read_text())["cases"]
    assert case["tile"] == [64, 128]
    assert case["case"] == (
        "b1 h1 hk1 nq128 nk128 d64 full f16 paper bhsd seed1 tile=64x128 "
        "smooth_k=off smooth_q=on rotate=on rounding=dither"
    )


def test_k_smoothing_is_what_saves_offset_keys(tmp_path):
    errors = {}
    for switch in ("on", "off"):
        out = tmp_path / "t.json"
        run(
            "trace",
            "--inputs",
            "offset",
            "--n",
            128,
            "--heads",
            1,
            "--recipe",
            f"vectorwise smooth_k={switch}",
            "--json",
            out,
        )
        errors[switch] = json.loads(out.read_text())["cases"][0]["tensors"]["dQ"]["rel_l2"]
    assert errors["on"] < 0.03 < 3 * errors["on"] < errors["off"]


def test_verbose_reports_progress():
    lines = run("trace", "--n", 64, "--sigma", "1,3", "--verbose").stderr.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("[4/4]")


# --- captured tensors


@needs_pages
def test_captured_layers(tmp_path):
    path, out, page = tmp_path / "c.safetensors", tmp_path / "t.json", tmp_path / "t.html"
    capture(path, layers=(3, 12, 0), heads=4, kv_heads=2)
    run("trace", "--from", path, "--causal", "--json", out, "--html", page)
    cases = json.loads(out.read_text())["cases"]
    assert [c["inputs"] for c in cases[::2]] == ["layer.0", "layer.3", "layer.12"]
    for case in cases:
        check_case(case)
        assert (
            case["sigma"] is None
            and case["heads"] == 4
            and case["causal"]
            and case["dtype"] == "f32"
        )
        assert case["tensors"]["dK"]["rel_l2"] < 0.1
    assert "Captured layers" in page.read_text()


def test_captured_values_are_the_ones_compared(tmp_path):
    # Zero queries make P uniform, whose codes are exact: what is left in O is the rounding of V.
    # One huge value sets the scale of its block, so all others round to zero, and the error can be
    # written down.
    path, out = tmp_path / "c.safetensors", tmp_path / "t.json"
    tensors = capture(path, heads=1, kv_heads=1, n=64)
    tensors["q"][0] = 0
    tensors["v"][0, 5, 3] = 1e4
    save_file(tensors, path)
    run(
        "trace",
        "--from",
        path,
        "--full",
        "--recipe",
        "vectorwise",
        "--json",
        out,
    )
    error = json.loads(out.read_text())["cases"][0]["tensors"]["O"]
    exact = tensors["v"][0].astype(np.float64).mean(0)
    rounded = np.zeros_like(exact)
    rounded[3] = 1e4 / 64
    assert error["rel_l2"] == pytest.approx(
        np.linalg.norm(rounded - exact) / np.linalg.norm(exact), rel=1e-4
    )


@pytest.mark.parametrize("shape", [(2, 64, 32), (1, 2, 64, 32)])
def test_three_and_four_dimensions_are_the_same(tmp_path, shape):
    rng = np.random.default_rng(1)
    tensors = {
        t: rng.standard_normal((2, 64, 32)).astype(np.float16).reshape(shape)
        for t in ("q", "k", "v", "dout")
    }
    path, out = tmp_path / "c.safetensors", tmp_path / "t.json"
    save_file(tensors, path)
    run("trace", "--from", path, "--full", "--json", out)
    case = json.loads(out.read_text())["cases"][0]
    assert (case["batch"], case["heads"], case["n"], case["d"], case["dtype"]) == (
        1,
        2,
        64,
        32,
        "f16",
    )


def test_bf16_capture(tmp_path):
    # numpy has no bfloat16: write the upper halves of float32 by hand.
    rng = np.random.default_rng(2)
    header, data = {}, b""
    for name in ("q", "k", "v", "dout"):
        values = (
            (rng.standard_normal((2, 64, 32)).astype(np.float32).view(np.uint32) >> 16)
            .astype("<u2")
            .tobytes()
        )
        header[name] = {
            "dtype": "BF16",
            "shape": [2, 64, 32],
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
    text = json.dumps(header).encode()
    path, out = tmp_path / "c.safetensors", tmp_path / "t.json"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    run("trace", "--from", path, "--full", "--json", out)
    assert json.loads(out.read_text())["cases"][0]["dtype"] == "bf16"


def describe(causal=False, align="bottom_right", window=(-1, -1), scale=0.2, **documents):
    about = dict(causal=causal, align=align, window=list(window), softmax_scale=scale, **documents)
    return json.dumps(about)


def errors(path, out, *options):
    run("trace", "--from", path, *options, "--recipe", "vectorwise", "--json", out)
    cases = json.loads(out.read_text())["cases"]
    return cases, [{t: c["tensors"][t]["rel_l2"] for t in TENSORS} for c in cases]


def test_captures_are_traced_as_what_they_were(tmp_path):
    """Mask, window, scale and documents of the file count, and all of them change the errors."""
    path, out = tmp_path / "c.safetensors", tmp_path / "t.json"
    tensors = capture(path, n=96)
    seen = [errors(path, out, "--full")[1][0], errors(path, out, "--causal")[1][0]]
    for about, words in [
        (describe(), ["full", "scale=0.2"]),
        (describe(causal=True), ["causal", "scale=0.2"]),
        (describe(window=(9, 4)), ["window=9,4", "scale=0.2"]),
        (describe(causal=True, window=(9, -1), scale=0.5), ["window=9,-1", "scale=0.5"]),
    ]:
        save_file(tensors, path, {"attention": about})
        cases, found = errors(path, out)
        assert all(word in cases[0]["case"].split() for word in words), cases[0]["case"]
        assert found[0] not in seen
        seen += found
    # The scale that is the default anyway: as if the options had said it.
    save_file(tensors, path, {"attention": describe(causal=True, scale=32**-0.5)})
    assert errors(path, out)[1][0] == pytest.approx(seen[1], rel=1e-4)


def test_documents_of_a_capture_are_traced_one_by_one(tmp_path):
    path, part, out = tmp_path / "c.safetensors", tmp_path / "p.safetensors", tmp_path / "t.json"
    tensors = capture(path, layers=(7,), heads=4, n=96)
    cuts = [0, 30, 30, 96]
    save_file(
        tensors,
        path,
        {"layer.7.attention": describe(causal=True, cu_seqlens_q=cuts, cu_seqlens_k=cuts)},
    )
    cases, found = errors(path, out)
    assert [c["inputs"] for c in cases] == ["layer.7 document 0", "layer.7 document 2"]
    for (a, b), want in zip(((0, 30), (30, 96)), found):
        alone = {n: np.ascontiguousarray(t[:, a:b]) for n, t in tensors.items()}
        save_file(alone, part, {"layer.7.attention": describe(causal=True)})
        assert errors(part, out)[1][0] == want


def test_captures_that_do_not_say_what_they_are_need_an_option(tmp_path):
    path = tmp_path / "c.safetensors"
    tensors = capture(path, n=64)
    line = refused("trace", "--from", path)
    assert "--causal or --full" in line and "sagebwd.diagnose" in line
    assert "--full" in refused("trace", "--from", path, "--causal", "--full")
    save_file(tensors, path, {"attention": describe()})
    assert "leave out --causal" in refused("trace", "--from", path, "--causal")
    save_file(tensors, path, {"attention": '{"causal": true}'})
    assert '"align" is missing' in refused("trace", "--from", path)


def spoiled(path, change):
    """Spoils a good capture: `change` edits the header, or returns the bytes of a whole file."""
    capture(path, n=64)
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    result = change(header, data, raw)
    if isinstance(result, bytes):
        path.write_bytes(result)
    else:
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _overlap(header, data, raw):
    first, second = sorted(header, key=lambda name: header[name]["data_offsets"])[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


def _beyond(header, data, raw):
    header["q"]["data_offsets"] = [len(data), len(data) + 2 * 64 * 32 * 4]


def _reversed(header, data, raw):
    header["q"]["data_offsets"] = header["q"]["data_offsets"][::-1]


def _wrong_dtype(header, data, raw):
    header["q"]["dtype"] = "I32"


def _huge_shape(header, data, raw):
    header["q"]["shape"] = [2**40, 2**40, 2**40]


def _missing(header, data, raw):
    header["other"] = header.pop("dout")


BAD_FILES = {
    "empty": (lambda h, d, r: b"", "bytes long"),
    "cut in the header": (lambda h, d, r: r[:40], "truncated"),
    "cut in the data": (lambda h, d, r: r[:-100], "outside"),
    "trailing bytes": (lambda h, d, r: r + b"x", "belong to none"),
    "header too long": (lambda h, d, r: struct.pack("<Q", 2**63) + r[8:], "above the limit"),
    "not JSON": (lambda h, d, r: struct.pack("<Q", 4) + b"{oh}", "not valid JSON"),
    "overlap": (_overlap, "overlaps"),
    "out of range": (_beyond, "outside"),
    "reversed": (_reversed, "outside"),
    "wrong dtype": (_wrong_dtype, "expected dtype F32, BF16 or F16"),
    "huge shape": (_huge_shape, "too large"),
    "missing tensor": (_missing, '"dout" is missing'),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_captures_are_refused(tmp_path, name):
    change, message = BAD_FILES[name]
    path = tmp_path / "bad.safetensors"
    spoiled(path, change)
    line = refused("trace", "--from", path)
    assert message in line and "bad.safetensors" in line


def test_mixed_dtypes_need_a_choice(tmp_path):
    path = tmp_path / "c.safetensors"
    tensors = capture(path, n=64)
    tensors["k"] = tensors["k"].astype(np.float16)
    save_file(tensors, path)
    assert "--dtype" in refused("trace", "--from", path)
    run("trace", "--from", path, "--full", "--dtype", "bf16")


# --- report


class Page(HTMLParser):
    """Collects what a page is made of and checks that elements nest."""

    VOID = {"meta", "line", "circle", "path", "rect", "br"}

    def __init__(self, text):
        super().__init__()
        self.open, self.charts, self.classes, self.attributes = [], [], [], []
        self.feed(text)
        assert self.open == [], f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.attributes += attrs.items()
        self.classes += attrs.get("class", "").split()
        if tag == "svg" and "aria-label" in attrs:  # others are parts of a chart
            self.charts.append(attrs["aria-label"])
        if tag not in self.VOID:
            self.open.append(tag)
        elif tag in ("circle", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


@needs_pages
@pytest.mark.slow
def test_report(tmp_path):
    html = tmp_path / "r.html"
    done = run("report", "--quick", "--html", html)
    record = json.loads((tmp_path / "r.json").read_text())
    for case in record["cases"]:
        check_case(case)
    inputs = {(c["inputs"], c["sigma"]) for c in record["cases"]}
    hard = "outlier channels sink sink_middle sinks previous delimiters7 long".split()
    assert inputs == {("gaussian", s) for s in (1, 3, 5, 8, 10)} | {(kind, 1) for kind in hard}
    assert {(c["recipe"], c["lift"]) for c in record["cases"]} == {
        ("paper", ""),
        ("vectorwise", ""),
        ("vectorwise", "all"),
    }
    assert record["speed"]["results"]

    text = html.read_text()
    page = Page(text)
    for tensor in ("O", "dQ", "dK", "dV"):
        assert f"{tensor}, relative L2 error" in page.charts
    for kind in hard:
        assert f"{kind} σ=1" in page.charts
    assert page.classes.count("ring") == 20  # published points: five sigmas, four tensors
    assert page.classes.count("dot") == 4 * 5 * 3
    assert page.classes.count("bar") == len(hard) * 4 * 3
    style = (ROOT / "python" / "sagebwd" / "pages" / "report.css").read_text()
    assert style in text and "prefers-color-scheme: dark" in style
    assert not [a for a in page.attributes if a[0] in ("src", "href")], "the page must stand alone"

    words = done.stdout
    assert "gate" in words and "Wrote" in words
    assert words.rindex("`vectorwise`") > words.rindex("gates")  # ends with the verdict


@needs_pages
@pytest.mark.slow
def test_report_writes_where_it_is_told(tmp_path):
    run("report", "--quick", "--html", tmp_path / "a.html", "--json", tmp_path / "b.json")
    assert (tmp_path / "a.html").exists() and (tmp_path / "b.json").exists()
    assert not (tmp_path / "a.json").exists()


@needs_pages
@pytest.mark.slow
def test_without_the_python_package_there_is_no_page(tmp_path):
    alone = {"SAGEBWD_PYTHON": ""}
    for command in (("report", "--quick"), ("trace", "--n", 64)):
        words = refused(*command, "--html", tmp_path / "a.html", env=alone)
        assert "pip install ." in words and "python -m sagebwd.pages" in words
    done = run("report", "--quick", "--json", tmp_path / "r.json", env=alone)
    assert f"python -m sagebwd.pages {tmp_path / 'r.json'} report.html" in done.stdout
    page = tmp_path / "r.html"
    command = [sys.executable, "-m", "sagebwd.pages", str(tmp_path / "r.json"), str(page)]
    subprocess.run(command, check=True)
    assert Page(page.read_text()).classes.count("ring") == 20
    broken = run(
        "trace", "--n", 64, "--html", page, env={"SAGEBWD_PYTHON": "/bin/false"}, check=False
    )
    assert broken.returncode == 2 and "SAGEBWD_PYTHON" in broken.stderr


# --- bench


def test_bench_json(tmp_path):
    out = tmp_path / "b.json"
    done = run(
        "bench",
        "h2 n128 d32 causal",
        "h1 n128 d64 paper",
        "--reps",
        3,
        "--threads",
        1,
        "--json",
        out,
    )
    assert "share of peak" in done.stdout and "INT8 part" in done.stdout
    record = json.loads(out.read_text())
    assert record["threads"] == 1 and record["reps"] == 3
    for result in record["results"]:
        forward, backward, both = (result[p] for p in ("forward", "backward", "both"))
        for p in (forward, backward, both):
            assert 0 < p["min_ms"] <= p["median_ms"] <= p["max_ms"]
            assert p["gmacs"] == pytest.approx(
                (p["int8_macs"] + p["floating_macs"]) / p["median_ms"] / 1e6
            )
            if "peak" in result:
                peak = result["peak"]
                assert p["share_of_peak"] == pytest.approx(p["int8_gmacs"] / peak["int8_gmacs"])
                left = p["median_ms"] / 1e3 - p["floating_macs"] / (peak["fp32_gmacs"] * 1e9)
                expected = p["int8_macs"] / (left * peak["int8_gmacs"] * 1e9)
                assert p["share_of_peak_int8_part"] == pytest.approx(expected)
        assert both["int8_macs"] == forward["int8_macs"] + backward["int8_macs"]
    pairs = 128 * 129 // 2
    assert record["results"][0]["backward"]["int8_macs"] == 4 * 2 * pairs * 32


def test_bench_runs_a_pinned_implementation(tmp_path):
    out = tmp_path / "b.json"
    run("bench", "n64 d32", "--impl", "ref", "--reps", 1, "--json", out)
    assert json.loads(out.read_text())["results"][0]["impl"] == "ref"


@needs_pages
def test_files_are_not_overwritten_by_others(tmp_path):
    captured = tmp_path / "captured.safetensors"
    capture(captured)
    before = captured.read_bytes()
    (tmp_path / "link").symlink_to(captured)
    os.link(captured, tmp_path / "hard")
    for name in ("captured.safetensors", "link", "hard", "./captured.safetensors"):
        words = refused("trace", "--from", captured, "--full", "--json", f"{tmp_path}/{name}")
        assert "--json" in words and "--from" in words
        assert captured.read_bytes() == before
    new, away = tmp_path / "new", tmp_path / "away"
    away.symlink_to("new")  # a link to a file that is not there yet
    for second in (new, away, tmp_path / "." / "new"):
        words = refused("trace", "--n", 64, "--json", new, "--html", second)
        assert "--html" in words and "--json" in words
    assert "--json" in refused("report", "--quick", "--html", new, "--json", new)
    assert not new.exists()
    run("trace", "--n", 64, "--json", "/dev/null", "--html", "/dev/null")


def test_names_that_are_not_utf8(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff\xfe.json"
    done = subprocess.run([BINARY, "trace", "--n", "64", "--json", path], capture_output=True)
    assert done.returncode == 0, done.stderr
    with open(path, encoding="utf-8") as file:
        assert "\ufffd" in json.load(file)["command"]


def test_what_memory_cannot_hold_is_refused_in_words(tmp_path):
    for case in ("h65536 n16777216 d256", "b1000 h1000 n1000000 d128"):
        for command in (("bench", case), ("trace", "--case", case)):
            assert "GiB of memory" in refused(*command)
    size = 2**41
    shape = [1, size // 256, 64]
    tensors, at = {}, 0
    for name in ("q", "k", "v", "dout"):
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(tensors).encode()
    sparse = tmp_path / "sparse.safetensors"
    with open(sparse, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        try:
            file.truncate(8 + len(header) + at)
        except OSError:
            pytest.skip("the file system has no files of that size")
    assert "GiB of memory" in refused("trace", "--from", sparse, "--full")


def test_control_characters_of_tensors_stay_off_the_terminal(tmp_path):
    path = tmp_path / "hostile.safetensors"
    rng = np.random.default_rng(0)
    prefix = "layer\x1b[2J\x9b31m\x07."
    save_file(
        {prefix + t: rng.normal(size=(1, 64, 32)).astype(np.float32) for t in "qkv"}, str(path)
    )
    done = run("trace", "--from", path, "--full", "-v", check=False)
    shown = done.stdout + done.stderr
    assert r"\x1b[2J" in shown
    assert not any(c in shown for c in "\x1b\x9b\x07"), shown
