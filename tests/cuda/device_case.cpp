// SPDX-License-Identifier: Apache-2.0
#include "device_case.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "base/dispatch_dtype.h"
#include "base/hash.h"
#include "base/parallel.h"
#include "ref/attention_exact.h"
#include "ref/problem_visibility.h"
#include "ref/ref.h"

namespace sagebwd::gpu {
namespace {

constexpr int64_t kGuard = 512;  // elements before and behind every output

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Device memory of known content.
class Memory {
 public:
  Memory(const void* from, size_t bytes) : bytes_(bytes) {
    check(cudaMalloc(&data_, bytes + 1));
    check(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> out(bytes_);
    check(cudaMemcpy(out.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

/// Of the tensors of a case; data null.
struct Shapes {
  explicit Shapes(const spec::AttnCase& c)
      : q(c.q_view(nullptr)), k(c.k_view(nullptr)), v(c.v_view(nullptr)), o(c.o_view(nullptr)) {}
  TensorView q, k, v, o;
};

/// Host bytes with a strided view into them.
struct Placed {
  std::vector<std::byte> bytes;
  TensorView view;  // data points into `bytes`

  /// Shapes are those of AttnCase's views.
  Placed(const DeviceCase& dc, const TensorView& like, int poison) {
    const spec::AttnCase& c = dc.c;
    const int64_t heads = like.shape[1], n = like.shape[2], d = like.shape[3];
    int64_t token = d, head = n * d, batch = heads * n * d, start = kGuard;
    if (c.layout == spec::Layout::bshd) token = heads * d, head = d, batch = n * heads * d;
    if (dc.placement == Placement::gaps) {
      start += 1;
      token = d + 3, head = n * token + 5, batch = heads * head + 7;
    }
    const int64_t elements = start + batch * c.b + kGuard, size = dtype_size(c.dtype);
    bytes.assign(static_cast<size_t>(elements * size), static_cast<std::byte>(poison));
    view = {bytes.data() + start * size, c.dtype, like.shape, {batch, head, token, 1}};
  }
  void write(const std::vector<float>& x) {
    for_each([&](auto& to, size_t i) { to = from_float<std::decay_t<decltype(to)>>(x[i]); });
  }
  std::vector<float> read() {
    std::vector<float> x(
        static_cast<size_t>(view.shape[0] * view.shape[1] * view.shape[2] * view.shape[3]));
    for_each([&](auto& from, size_t i) { x[i] = to_float(from); });
    return x;
  }
  /// f(element, i) for every element, i in contiguous order.
  template <typename F>
  void for_each(F f) {
    with_dtype(view.dtype, [&](auto type) {
      auto* data = static_cast<decltype(type)*>(view.data);
      size_t i = 0;
      for (int64_t b = 0; b < view.shape[0]; ++b)
        for (int64_t h = 0; h < view.shape[1]; ++h)
          for (int64_t n = 0; n < view.shape[2]; ++n)
            for (int64_t d = 0; d < view.shape[3]; ++d)
              f(data[b * view.stride[0] + h * view.stride[1] + n * view.stride[2] + d], i++);
    });
  }
  TensorView on(const Memory& m) const {
    TensorView v = view;
    v.data = m.data() + (static_cast<std::byte*>(view.data) - bytes.data());
    return v;
  }
};

/// An output tensor on the device, poisoned and guarded.
struct Output {
  Placed host;
  Memory device;
  Output(const DeviceCase& dc, const TensorView& like)
      : host(dc, like, dc.poison), device(host.bytes.data(), host.bytes.size()) {}
  TensorView view() const { return host.on(device); }
  std::vector<float> read(const char* name) {
    std::vector<std::byte> got = device.read();
    std::vector<std::byte> outside = host.bytes;  // what must not have changed
    std::memcpy(host.bytes.data(), got.data(), got.size());
    std::vector<float> x = host.read();
    host.for_each([&](auto& at, size_t) {
      const auto first = reinterpret_cast<std::byte*>(&at) - host.bytes.data();
      std::memcpy(&outside[static_cast<size_t>(first)], &at, sizeof(at));
    });
    for (size_t i = 0; i < got.size(); ++i)
      if (got[i] != outside[i])
        throw std::runtime_error(std::string(name) + ": memory outside the tensor was written");
    return x;
  }
};

struct Input {
  Placed host;
  Memory device;
  Input(const DeviceCase& dc, const TensorView& like, const std::vector<float>& x)
      : host(filled(dc, like, x)), device(host.bytes.data(), host.bytes.size()) {
    if (dc.placement == Placement::one_head) host.view.stride[1] = 0;
    if (dc.placement == Placement::one_batch) host.view.stride[0] = 0;
  }
  TensorView view() const { return host.on(device); }
  static Placed filled(const DeviceCase& dc, const TensorView& like, const std::vector<float>& x) {
    Placed p(dc, like, 0xff);  // NaN between the rows: nobody may read it
    p.write(x);
    return p;
  }
};

std::vector<float> read_floats(const Memory& m) {
  const std::vector<std::byte> bytes = m.read();
  std::vector<float> x(bytes.size() / 4);
  std::memcpy(x.data(), bytes.data(), x.size() * 4);
  return x;
}

/// The implementation of a case for as long as this lives.
class Pin {
 public:
  Pin(const DeviceCase& dc, bool backward) {
    DeviceCase asked = dc;
    asked.cu_q.clear(), asked.cu_k.clear();  // some tests have impossible ones
    setenv("SAGEBWD_IMPL", device_candidate(asked, backward).name.c_str(), 1);
  }
  ~Pin() { unsetenv("SAGEBWD_IMPL"); }
  Pin(const Pin&) = delete;
};

Documents documents_of(const DeviceCase& dc) {
  if (dc.cu_q.empty()) return {};
  return {dc.cu_q.data(), dc.cu_k.data(), static_cast<int64_t>(dc.cu_q.size()) - 1};
}

void describe(const DeviceCase& dc, AttentionArgs& a) {
  a.scale = dc.scale, a.softcap = dc.c.softcap;
  a.mask = dc.c.mask;
  a.recipe = dc.c.recipe;
  a.documents = documents_of(dc);
  if (!dc.c.has_lists()) return;
  spec::AttnCase shape = dc.c;
  shape.lists = spec::ListKind::random;  // which looks at no inputs
  a.blocks = trace::make_lists(shape, {}, a.documents).shape;
  a.blocks.on_device = a.device == Device::cuda;
}

int64_t sequences(const DeviceCase& dc) {
  return dc.cu_q.empty() ? dc.c.b : static_cast<int64_t>(dc.cu_q.size()) - 1;
}

template <typename Args>
void run_with_workspace(Args& a, int poison, void (*call)(const Args&), Workspace* keep) {
  const size_t bytes = workspace_size(a);
  const size_t guard = 1024;
  const std::vector<std::byte> fill(bytes + guard, static_cast<std::byte>(poison));
  const Memory workspace(fill.data(), fill.size());
  a.workspace = workspace.data(), a.workspace_bytes = bytes;
  call(a);
  check(cudaDeviceSynchronize());
  const std::vector<std::byte> after = workspace.read();
  for (size_t i = bytes; i < after.size(); ++i)
    if (after[i] != fill[i]) throw std::runtime_error("memory behind the workspace was written");
  if (keep != nullptr) *keep = {spec::resolve(a, true), after};
}

/// O as the backward gets it: that of all keys.
std::vector<float> o_of_all(const DeviceCase& dc, std::vector<float> o) {
  for (float& x : o) x += dc.o_elsewhere;
  return o;
}

/// Makes all heads, or all batches, equal to the first, as the case's placement has them.
void repeat(const DeviceCase& dc, int64_t heads, std::vector<float>& x) {
  if (dc.placement != Placement::one_head && dc.placement != Placement::one_batch) return;
  const bool of_heads = dc.placement == Placement::one_head;
  const size_t batch = x.size() / static_cast<size_t>(dc.c.b), whole = of_heads ? batch : x.size(),
               part = of_heads ? batch / static_cast<size_t>(heads) : batch;
  for (size_t i = 0; i < x.size(); ++i)
    if (i % whole >= part) x[i] = x[i - part];
}

bool is_bad(float x) { return !std::isfinite(x); }

}  // namespace

const char* no_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return cudaGetErrorString(status);
  return count > 0 ? nullptr : "no CUDA device";
}

float rounded(float x, Dtype dtype) {
  return with_dtype(dtype, [&](auto type) { return to_float(from_float<decltype(type)>(x)); });
}

CaseInputs make_case_inputs(const DeviceCase& dc) {
  CaseInputs in{trace::make_inputs(dc.c, dc.kind, dc.sigma), {}, {}};
  if (dc.dlse)
    for (int64_t i = 0; i < dc.c.b * dc.c.h * dc.c.nq; ++i)
      in.dlse.push_back(unit_float(hash64({dc.c.seed, 77, static_cast<uint64_t>(i)})) - 0.5f);
  const auto dim = static_cast<size_t>(dc.c.value_dim());
  for (size_t i = 0; i < in.x.v.size() && dc.v_offset != 0.0f; ++i)
    in.x.v[i] = rounded(in.x.v[i] + (i % dim % 3 == 0 ? -dc.v_offset : dc.v_offset), dc.c.dtype);
  repeat(dc, dc.c.h, in.x.q), repeat(dc, dc.c.h, in.x.dout);
  repeat(dc, dc.c.hk, in.x.k), repeat(dc, dc.c.hk, in.x.v);
  in.lists = trace::make_lists(dc.c, in.x, documents_of(dc));
  return in;
}

std::vector<float>& tensor_of(CaseInputs& in, int tensor) {
  return *std::array{&in.x.q, &in.x.k, &in.x.v, &in.x.dout}.at(static_cast<size_t>(tensor));
}

Results run_on_device(const DeviceCase& dc, const CaseInputs& in, float lse_shift,
                      Workspaces* workspaces) {
  const spec::AttnCase& c = dc.c;
  const Shapes s(c);
  const Input q(dc, s.q, in.x.q), k(dc, s.k, in.x.k), v(dc, s.v, in.x.v), dout(dc, s.o, in.x.dout);
  Output o(dc, s.o), dq(dc, s.q), dk(dc, s.k), dv(dc, s.v);
  const std::vector<float> stats(static_cast<size_t>(c.b * c.h * c.nq), NAN),
      tops(static_cast<size_t>(sequences(dc) * c.h), NAN);
  const Memory lse(stats.data(), stats.size() * 4), top(tops.data(), tops.size() * 4),
      dlse(in.dlse.data(), in.dlse.size() * 4), cu_q(dc.cu_q.data(), dc.cu_q.size() * 4),
      cu_k(dc.cu_k.data(), dc.cu_k.size() * 4),
      list_index(in.lists.index.data(), in.lists.index.size() * 4),
      list_count(in.lists.count.data(), in.lists.count.size() * 4);
  Results r;

  ForwardArgs f;
  f.device = Device::cuda;
  f.q = q.view(), f.k = k.view(), f.v = v.view(), f.o = o.view();
  f.lse = contiguous_stats(reinterpret_cast<float*>(lse.data()), c.h, c.nq);
  f.max_logit = reinterpret_cast<float*>(top.data());
  describe(dc, f);
  if (dc.c.has_lists()) {
    f.blocks.index = reinterpret_cast<const int32_t*>(list_index.data());
    f.blocks.count = reinterpret_cast<const int32_t*>(list_count.data());
  }
  if (dc.cu_on_device)
    f.documents = {reinterpret_cast<const int32_t*>(cu_q.data()),
                   reinterpret_cast<const int32_t*>(cu_k.data()), f.documents.count, true};
  const size_t codes_bytes = dc.codes ? codes_size(f) : 0, guard = 64;
  const std::vector<std::byte> fill(codes_bytes + guard, static_cast<std::byte>(dc.poison));
  const Memory codes(fill.data(), fill.size());
  if (dc.codes) f.codes = codes.data(), f.codes_bytes = codes_bytes;
  {
    const Pin pin(dc, false);
    run_with_workspace(f, dc.poison, forward, workspaces ? &workspaces->forward : nullptr);
  }
  std::vector<std::byte> saved = codes.read();
  if (!std::equal(saved.begin() + static_cast<int64_t>(codes_bytes), saved.end(), fill.begin()))
    throw std::runtime_error("memory behind the codes was written");
  saved.resize(codes_bytes);
  if (workspaces != nullptr) workspaces->codes = saved;
  r.o = o.read("o");
  r.lse = read_floats(lse), r.max_logit = read_floats(top);

  std::vector<float> shifted = r.lse;
  for (float& x : shifted) x += lse_shift;
  const Memory lse_in(shifted.data(), shifted.size() * 4);
  const Input o_in(dc, s.o, o_of_all(dc, r.o));
  BackwardArgs g;
  static_cast<AttentionArgs&>(g) = f;
  g.o = o_in.view(), g.lse = contiguous_stats(reinterpret_cast<float*>(lse_in.data()), c.h, c.nq);
  if (dc.codes) g.q.data = g.k.data = g.v.data = nullptr;
  g.dout = dout.view(), g.dq = dq.view(), g.dk = dk.view(), g.dv = dv.view();
  if (dc.dlse) g.dlse = contiguous_stats(reinterpret_cast<float*>(dlse.data()), c.h, c.nq);
  g.partial_kv = dc.partial_kv, g.deterministic = dc.deterministic;
  const Pin pin(dc, true);
  run_with_workspace(g, dc.poison, backward, workspaces ? &workspaces->backward : nullptr);
  r.dq = dq.read("dq"), r.dk = dk.read("dk"), r.dv = dv.read("dv");
  return r;
}

Results run_oracle(const DeviceCase& dc, const CaseInputs& in, const Results& given,
                   float lse_shift) {
  const spec::AttnCase& c = dc.c;
  DeviceCase plain = dc;
  plain.placement = Placement::plain, plain.c.layout = spec::Layout::bhsd;
  const auto filled = [&](const TensorView& like, const std::vector<float>& x) {
    return Input::filled(plain, like, x);
  };
  const Shapes s(c);
  Placed q = filled(s.q, in.x.q), k = filled(s.k, in.x.k), v = filled(s.v, in.x.v),
         dout = filled(s.o, in.x.dout), o(plain, s.o, 0), o_in = filled(s.o, o_of_all(dc, given.o)),
         dq(plain, s.q, 0), dk(plain, s.k, 0), dv(plain, s.v, 0);
  Results r;
  r.lse.resize(given.lse.size()), r.max_logit.resize(given.max_logit.size());

  ForwardArgs f;
  f.q = q.view, f.k = k.view, f.v = v.view, f.o = o.view;
  f.lse = contiguous_stats(r.lse.data(), c.h, c.nq);
  f.max_logit = r.max_logit.data();
  describe(plain, f);
  f.blocks = in.lists.view();
  Candidate tiles = device_candidate(dc, false);
  f.recipe.tile_q = tiles.tile_q, f.recipe.tile_k = tiles.tile_k;
  ref::implementation().forward(spec::resolve(f, true), f, nullptr);
  r.o = o.read();

  std::vector<float> lse = given.lse, dlse = in.dlse;
  for (float& x : lse) x += lse_shift;
  BackwardArgs g;
  static_cast<AttentionArgs&>(g) = f;
  g.o = o_in.view, g.lse = contiguous_stats(lse.data(), c.h, c.nq);
  g.dout = dout.view, g.dq = dq.view, g.dk = dk.view, g.dv = dv.view;
  if (dc.dlse) g.dlse = contiguous_stats(dlse.data(), c.h, c.nq);
  g.partial_kv = dc.partial_kv;
  tiles = device_candidate(dc, true);
  g.recipe.tile_q = tiles.tile_q, g.recipe.tile_k = tiles.tile_k;
  ref::implementation().backward(spec::resolve(g, true), g, nullptr);
  r.dq = dq.read(), r.dk = dk.read(), r.dv = dv.read();
  if (tiles.dk_q != tiles.tile_q) {
    g.recipe.tile_q = tiles.dk_q;
    ref::implementation().backward(spec::resolve(g, true), g, nullptr);
    r.dk = dk.read();
  }
  return r;
}

std::vector<std::byte> oracle_codes(const DeviceCase& dc, const CaseInputs& in) {
  const spec::AttnCase& c = dc.c;
  DeviceCase plain = dc;
  plain.placement = Placement::plain, plain.c.layout = spec::Layout::bhsd;
  const Shapes s(c);
  Placed q = Input::filled(plain, s.q, in.x.q), k = Input::filled(plain, s.k, in.x.k),
         v = Input::filled(plain, s.v, in.x.v), o(plain, s.o, 0);
  std::vector<float> lse(static_cast<size_t>(c.b * c.h * c.nq));
  ForwardArgs f;
  f.q = q.view, f.k = k.view, f.v = v.view, f.o = o.view;
  f.lse = contiguous_stats(lse.data(), c.h, c.nq);
  describe(plain, f);
  f.blocks = in.lists.view();
  std::vector<std::byte> codes(codes_size(f), static_cast<std::byte>(dc.poison));
  f.codes = codes.data(), f.codes_bytes = codes.size();
  ref::implementation().forward(spec::resolve(f, true), f, nullptr);
  return codes;
}

Results run_exact(const DeviceCase& dc, const CaseInputs& in) {
  const spec::AttnCase& c = dc.c;
  Results r;
  r.o.resize(in.x.dout.size()), r.dq.resize(in.x.q.size());
  r.dk.resize(in.x.k.size()), r.dv.resize(in.x.v.size());
  r.lse.resize(static_cast<size_t>(c.b * c.h * c.nq));
  r.max_logit.resize(static_cast<size_t>(c.b * c.h));
  if (c.nq == 0 || c.nk == 0) {  // zeros, and no logit anywhere
    std::fill(r.lse.begin(), r.lse.end(), -INFINITY);
    std::fill(r.max_logit.begin(), r.max_logit.end(), -INFINITY);
    return r;
  }
  const int64_t dv = c.value_dim();
  const auto rows = [](const std::vector<float>& x, int64_t head, int64_t n, int64_t d) {
    return std::vector<double>(x.begin() + head * n * d, x.begin() + (head + 1) * n * d);
  };
  const auto add = [](std::vector<float>& to, int64_t head, const std::vector<double>& x) {
    for (size_t n = 0; n < x.size(); ++n)
      to[static_cast<size_t>(head) * x.size() + n] += static_cast<float>(x[n]);
  };
  const int64_t group = c.h / c.hk;
  parallel_for({}, c.b * c.hk, [&](int64_t kv) {
    for (int64_t i = kv * group; i < (kv + 1) * group; ++i) {  // (b·h) of the query heads
      const std::vector<double> q = rows(in.x.q, i, c.nq, c.d), k = rows(in.x.k, kv, c.nk, c.d),
                                v = rows(in.x.v, kv, c.nk, dv), dout = rows(in.x.dout, i, c.nq, dv);
      ref::ExactHead head;
      head.nq = c.nq, head.nk = c.nk, head.d = c.d, head.dv = dv;
      head.q = q.data(), head.k = k.data(), head.v = v.data(), head.dout = dout.data();
      head.scale = dc.scale != 0.0f ? static_cast<double>(dc.scale)
                                    : 1.0 / std::sqrt(static_cast<double>(c.d));
      head.softcap = static_cast<double>(c.softcap);
      const std::vector<double> dlse(in.dlse.begin() + (dc.dlse ? i * c.nq : 0),
                                     in.dlse.begin() + (dc.dlse ? (i + 1) * c.nq : 0));
      if (dc.dlse) head.dlse = dlse.data();
      spec::Problem problem = c.problem();
      problem.blocks = in.lists.view();
      head.visible = ref::visibility_of(problem, i / c.h, i % c.h);
      const ref::ExactResult e = ref::attention_exact(head);
      add(r.o, i, e.o), add(r.dq, i, e.dq), add(r.lse, i, e.lse);
      add(r.dk, kv, e.dk), add(r.dv, kv, e.dv);
      r.max_logit[static_cast<size_t>(i)] = static_cast<float>(e.max_logit);
    }
  });
  return r;
}

double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (is_bad(a[i]) != is_bad(b[i])) return std::numeric_limits<double>::infinity();
    if (is_bad(a[i])) continue;
    error += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    norm += static_cast<double>(b[i]) * b[i];
  }
  // A tensor that is zero but for rounding (dK of a single key) is compared with values of 1e-4.
  norm = std::max(norm, 1e-8 * static_cast<double>(b.size()));
  return error == 0 ? 0 : std::sqrt(error / norm);
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (is_bad(a[i]) != is_bad(b[i])) return std::numeric_limits<double>::infinity();
    if (!is_bad(a[i])) worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return worst;
}

std::string tuned_implementation() {
  const char* name = std::getenv("SAGEBWD_TEST_IMPL");
  return name != nullptr ? name : "cuda-sm80";
}

bool works_in_halves(const DeviceCase& dc) {
  return device_candidate(dc, false).name == "cuda-sm90" ||
         device_candidate(dc, true).name == "cuda-sm90";
}

Candidate device_candidate(const DeviceCase& dc, bool backward) {
  BackwardArgs g;
  g.device = Device::cuda;
  const spec::AttnCase& c = dc.c;
  g.partial_kv = dc.partial_kv, g.deterministic = dc.deterministic;
  g.q = g.dq = c.q_view(nullptr), g.o = g.dout = c.o_view(nullptr);
  g.k = g.dk = c.k_view(nullptr), g.v = g.dv = c.v_view(nullptr);
  describe(dc, g);
  ForwardArgs f;
  static_cast<AttentionArgs&>(f) = g;
  std::string name = dc.impl;
  for (const Candidate& candidate : backward ? explain(g) : explain(f)) {
    if (candidate.name != name) continue;
    if (candidate.supported || name != "cuda-sm90") return candidate;
    name = "cuda-sm80";  // which comes behind it
  }
  throw std::runtime_error("the CUDA implementation is not in the list");
}

}  // namespace sagebwd::gpu
