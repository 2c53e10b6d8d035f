// SPDX-License-Identifier: Apache-2.0
// Forward and backward as a sequence of kernels on the caller's stream: nothing here waits for the
// device, and nothing on the host has to outlive the call, so a call can be captured into a graph.
#include "cuda/plain/run.h"

#include <algorithm>
#include <cstdint>

#include "base/math.h"
#include "cuda/host/arena.h"
#include "cuda/host/blocks.h"
#include "cuda/host/documents.h"
#include "cuda/host/views.h"
#include "cuda/lists/job.h"
#include "cuda/plain/backward.h"
#include "cuda/plain/centres.h"
#include "cuda/plain/forward.h"
#include "cuda/plain/prepare.h"
#include "cuda/plain/saved_codes.h"
#include "numerics/octaves.h"
#include "spec/codes.h"

namespace sagebwd::cuda::plain {
namespace {

using spec::Problem;

/// Channels from one row of codes or values to the next.
int pitch_of(int64_t d) { return static_cast<int>(round_up(d, 16)); }

/// Octaves of the longest sequence of keys.
int octaves_of(const Problem& p) {
  int64_t most = 0;
  const int64_t count = p.packed() ? p.documents.count : 1;
  for (int64_t t = 0; t < count; ++t) most = std::max(most, p.sequence(t).nk);
  return numerics::octaves_of(most);
}

/// The workspace of a call, and the parameters that point into it or into the caller's codes.
struct Space {
  Space(const Problem& p, void* base, void* codes)
      : arena(base),
        blocks(p, kBlock),
        centre_blocks(p, kKeysPerScale),
        saved(p, codes),
        has_codes(p.has_codes),
        forward(p.direction == spec::Direction::forward) {
    tq = p.b * p.nq, tk = p.b * p.nk;
    const Recipe& r = p.recipe;
    const bool paper = r.scheme == Scheme::paper;
    if (p.packed()) documents = arena.take<DocumentStart>(p.documents.count + 1);
    if (p.packed() && !paper) centre_documents = arena.take<DocumentStart>(p.documents.count + 1);
    const int64_t means = p.num_sequences() * p.hk;
    if (paper && r.smooth_k) {
      mean_part = arena.take<double>(p.hk * blocks.k * p.d);
      mean_counted = arena.take<int>(p.hk * blocks.k);
      k_mean = arena.take<float>(means * p.d);
    }
    if (r.smooth_q) q_mean = arena.take<float>(p.h * blocks.q * p.d);
    if (paper) mean_logit = arena.take<float>(p.h * tq);
    const bool lifted_s = p.lifted(forward ? kMatmulS : kMatmulSRecompute);
    q = operand(p.h, tq, p.d, blocks.q, true, lifted_s || (!forward && p.lifted(kMatmulDK)));
    q.scale = take_saved<float>(saved.layout.q_scale, p.h * tq);
    k = operand(p.hk, tk, p.d, blocks.k, true,
                lifted_s || r.smooth_q || (!forward && p.lifted(kMatmulDQ)));
    k.scale = take_saved<float>(saved.layout.k_scale, p.hk * tk);
    if (!paper) {
      const int64_t rows = p.hk * saved.layout.key_blocks;
      centres.key_blocks = saved.layout.key_blocks;
      centres.codes = take_saved<int8_t>(saved.layout.centre8, rows * p.d);
      centres.scale = take_saved<float>(saved.layout.centre_scale, rows);
      if (!lifted_s) centre_logit = arena.take<float>(octaves_of(p) * p.h * tq);
    }
    if (spec::folds_v(r)) {
      const int64_t rows = p.hk * saved.layout.key_blocks;
      v_centres.key_blocks = saved.layout.key_blocks;
      v_centres.codes = take_saved<int8_t>(saved.layout.v_centre8, rows * p.dv);
      v_centres.scale = take_saved<float>(saved.layout.v_centre_scale, rows);
    }
    const bool v_codes = forward ? !p.lifted(kMatmulO) : spec::folds_v(r);
    // In `paper` a tile of V that holds NaN or Inf is taken as it is.
    v = operand(p.hk, tk, p.dv, blocks.k, v_codes, (forward && paper) || !v_codes);
    if (v_codes) v.scale = take_saved<float>(saved.layout.v_scale, p.hk * tk);
    if (p.has_lists()) {
      lists.words = ceil_div(blocks.k, int64_t{32});
      lists.listed = arena.take<uint32_t>(p.h * blocks.q * lists.words);
      lists.leading = arena.take<uint32_t>(p.h * blocks.q * lists.words);
    }
    if (forward) {
      block_max = arena.take<float>(p.h * blocks.q);
      return;
    }
    dout = operand(p.h, tq, p.dv, blocks.q, true, true);
    dout.scale = arena.take<float>(p.h * tq);
    lse2 = arena.take<float>(p.h * tq);
    delta = arena.take<float>((spec::folds_v(r) ? octaves_of(p) : 1) * p.h * tq);
    dq_k = k, dq_mean = k_mean;
    if (!paper && !p.lifted(kMatmulDQ)) {
      dq_k = {.codes = arena.take<int8_t>(p.hk * tk * pitch_of(p.d)),
              .scale = arena.take<float>(p.hk * tk),
              .values = nullptr,
              .poisoned = nullptr};
      dq_mean = arena.take<float>(means * p.d);
      turned_dq_mean = arena.take<float>(means * p.d);
    }
    if (!r.rotate) return;
    if (r.smooth_q) turned_mean = arena.take<float>(p.h * blocks.q * p.d);
    const bool turns_dq = !p.lifted(kMatmulDQ), turns_dk = !p.lifted(kMatmulDK);
    float* rows =
        arena.take<float>(std::max(turns_dq ? p.h * tq : 0, turns_dk ? p.hk * tk : 0) * p.d);
    if (turns_dq) dq_rows = rows, row_sum = arena.take<float>(p.h * tq);
    if (turns_dk) dk_rows = rows;
  }
  bool writes_codes() const { return has_codes && forward; }
  bool reads_codes() const { return has_codes && !forward; }

  /// An array of the saved codes that starts at byte `at` there, or one of the workspace.
  template <typename T>
  T* take_saved(int64_t at, int64_t count) {
    if (!has_codes) return arena.take<T>(count);
    return saved.base == nullptr ? nullptr : reinterpret_cast<T*>(saved.base + at);
  }
  Operand operand(int64_t heads, int64_t tokens, int64_t d, int64_t token_blocks, bool codes,
                  bool values) {
    Operand o{};
    if (codes) o.codes = arena.take<int8_t>(heads * tokens * pitch_of(d));
    if (values) o.values = arena.take<float>(heads * tokens * pitch_of(d));
    o.poisoned = arena.take<int>(heads * token_blocks);
    return o;
  }

  Arena arena;
  Blocks blocks, centre_blocks;
  spec::CodesView saved;
  bool has_codes, forward;
  int64_t tq, tk;
  DocumentStart *documents = nullptr, *centre_documents = nullptr;
  double* mean_part = nullptr;
  int* mean_counted = nullptr;
  float *k_mean = nullptr, *q_mean = nullptr, *turned_mean = nullptr;
  float *mean_logit = nullptr, *centre_logit = nullptr;
  Centres centres{}, v_centres{};
  Operand q{}, k{}, v{}, dout{}, dq_k{};
  float *dq_mean = nullptr, *turned_dq_mean = nullptr;
  float *block_max = nullptr, *lse2 = nullptr, *delta = nullptr;
  float *dq_rows = nullptr, *dk_rows = nullptr, *row_sum = nullptr;
  ListBits lists{};
};

/// One call on its way: the steps both directions share.
struct Call {
  Call(const Problem& problem, const AttentionArgs& a, void* workspace)
      : p(problem),
        args(a),
        ws(problem, aligned(workspace), a.codes),
        tiles(tiles_of(problem)),
        stream(static_cast<cudaStream_t>(a.stream)) {
    batch = {ws.blocks.sequences(p, ws.documents), ws.blocks.q, ws.blocks.k, p.dtype};
    write_documents(p, ws.blocks, ws.documents, stream);
    if (ws.centre_documents != nullptr)
      write_documents(p, ws.centre_blocks, ws.centre_documents, stream);
    ws.centres.blocks = ws.v_centres.blocks = ws.centre_blocks.sequences(p, ws.centre_documents);
    if (p.has_lists())
      launch_list_bits(
          list_job(p, batch.seq, ws.blocks.q * kBlock, ws.blocks.k * kBlock, kBlock, kBlock),
          ws.lists, stream);
  }

  void mean_keys() const {
    if (ws.k_mean == nullptr) return;
    launch_mean({.batch = batch,
                 .heads = static_cast<int>(p.hk),
                 .d = static_cast<int>(p.d),
                 .k = input(args.k),
                 .part = ws.mean_part,
                 .counted = ws.mean_counted,
                 .mean = ws.k_mean},
                stream);
  }

  /// Codes of Q or dO, with one scale per token or per tile.
  TokenJob queries(const TensorView& x, const Operand& to) const {
    return {.batch = batch,
            .queries = true,
            .heads = static_cast<int>(p.h),
            .d = static_cast<int>(x.shape[3]),
            .pitch = pitch_of(x.shape[3]),
            .tokens = ws.tq,
            .x = input(x),
            .mean = nullptr,
            .centres = {},
            .run = paper() ? tiles.q : kBlock,
            .scale_of = paper() ? ScaleOf::run : ScaleOf::token,
            .run_mean = nullptr,
            .rotate = false,
            .turned_mean = nullptr,
            .to = to};
  }
  /// Codes of K or V, with a scale as `scale_of` says or, in `paper`, one per tile.
  TokenJob keys(const TensorView& x, ScaleOf scale_of, const Operand& to) const {
    TokenJob job = queries(x, to);
    job.queries = false;
    job.heads = static_cast<int>(p.hk), job.tokens = ws.tk;
    if (paper())
      job.run = tiles.k;
    else
      job.scale_of = scale_of;
    return job;
  }

  void quantize() const {
    mean_keys();
    TokenJob q = queries(args.q, ws.q);
    q.run_mean = ws.q_mean, q.turned_mean = ws.turned_mean;
    if (ws.q_mean != nullptr) q.run = tiles.q;
    TokenJob k = keys(args.k, ScaleOf::key, ws.k);
    k.mean = ws.k_mean;
    TokenJob v = keys(args.v, ScaleOf::value, ws.v);
    q.rotate = k.rotate = p.recipe.rotate;
    for (TokenJob* job : {&k, &v}) {
      job->centres = job == &k ? ws.centres : ws.v_centres;
      if (job->centres.codes != nullptr) make_centres(*job, job == &v);
    }
    for (const TokenJob& job : {q, k, v}) launch_tokens(job, stream);
  }

  void make_centres(const TokenJob& job, bool of_values) const {
    launch_centres({.batch = batch,
                    .heads = job.heads,
                    .d = job.d,
                    .x = job.x,
                    .of_values = of_values,
                    .smooth = p.recipe.smooth_k,
                    .rotate = job.rotate,
                    .blocks = ws.centre_blocks.k,
                    .to = job.centres},
                   stream);
  }
  void centre_logits() const {
    if (ws.centre_logit == nullptr) return;
    launch_centre_logits({.batch = batch,
                          .h = static_cast<int>(p.h),
                          .group = group(),
                          .d = static_cast<int>(p.d),
                          .pitch = pitch_of(p.d),
                          .tq = ws.tq,
                          .scale = p.scale,
                          .q = ws.q,
                          .centres = ws.centres,
                          .to = ws.centre_logit},
                         stream);
  }
  void dq_keys() const {
    if (ws.turned_dq_mean == nullptr) return;
    launch_dq_keys({.batch = batch,
                    .heads = static_cast<int>(p.hk),
                    .d = static_cast<int>(p.d),
                    .pitch = pitch_of(p.d),
                    .tokens = ws.tk,
                    .tile = tiles.k,
                    .rotated = p.recipe.rotate,
                    .k = ws.k,
                    .centres = ws.centres,
                    .turned_mean = ws.turned_dq_mean,
                    .mean = ws.dq_mean,
                    .to = ws.dq_k},
                   stream);
  }

  /// Between the codes of the workspace and those of the caller.
  void for_saved(void (*copy)(const SavedCodesJob&, cudaStream_t)) const {
    SavedCodesJob job{};
    job.batch = batch;
    job.queries = true, job.heads = static_cast<int>(p.h), job.tokens = ws.tq;
    job.codes = ws.q.codes, job.saved = ws.saved.q8();
    job.d = static_cast<int>(p.d), job.pitch = pitch_of(p.d);
    copy(job, stream);
    job.queries = false, job.heads = static_cast<int>(p.hk), job.tokens = ws.tk;
    job.codes = ws.k.codes, job.saved = ws.saved.k8();
    copy(job, stream);
    job.codes = ws.v.codes, job.saved = ws.saved.v8();
    job.d = static_cast<int>(p.dv), job.pitch = pitch_of(p.dv);
    copy(job, stream);
  }

  RowJob rows() const {
    RowJob job{};
    job.batch = batch;
    job.h = static_cast<int>(p.h);
    job.d = static_cast<int>(p.d), job.value_d = static_cast<int>(p.dv);
    job.group = group();
    job.tq = ws.tq;
    job.scale = p.scale, job.capped = p.capped();
    if (ws.mean_logit != nullptr) job.q = input(args.q);
    job.k_mean = ws.k_mean;
    job.mean_logit = ws.mean_logit;
    job.v_centres = ws.v_centres;
    return job;
  }

  Params params() const {
    const Recipe& r = p.recipe;
    return {.batch = batch,
            .mask = mask_of(p),
            .h = static_cast<int>(p.h),
            .hk = static_cast<int>(p.hk),
            .group = group(),
            .d = static_cast<int>(p.d),
            .pitch = pitch_of(p.d),
            .value_d = static_cast<int>(p.dv),
            .value_pitch = pitch_of(p.dv),
            .tq = ws.tq,
            .tk = ws.tk,
            .tile_q = tiles.q,
            .tile_k = tiles.k,
            .scheme = r.scheme,
            .dithered = r.rounding == Rounding::dither ? r.dithered : 0,
            .seed = r.seed,
            .lifted = r.high_precision,
            .scale = p.scale,
            .cap = numerics::softcap_of(p.softcap),
            .p_levels = static_cast<float>(tiles.p_levels),
            .exact_inputs = p.dtype != Dtype::f32,
            .folds_v = spec::folds_v(r),
            .q = ws.q,
            .k = ws.k,
            .v = ws.v,
            .v_centres = ws.v_centres,
            .q_mean = ws.q_mean,
            .mean_logit = ws.mean_logit,
            .centre_logit = ws.centre_logit,
            .lists = ws.lists};
  }

  bool paper() const { return p.recipe.scheme == Scheme::paper; }
  int group() const { return p.hk > 0 ? static_cast<int>(p.group()) : 1; }

  const Problem& p;
  const AttentionArgs& args;
  Space ws;
  backend::Tiles tiles;
  cudaStream_t stream;
  Batch batch{};
};

}  // namespace

backend::Tiles tiles_of(const Problem& p) { return backend::any_tiles(p, 255); }

size_t workspace_of(const Problem& p) {
  return Space(p, nullptr, nullptr).arena.used() + kDeviceAlign;
}

void forward(const Problem& p, const ForwardArgs& args, void* workspace) {
  const Call call(p, args, workspace);
  const Space& ws = call.ws;
  call.quantize();
  call.centre_logits();
  if (ws.mean_logit != nullptr) launch_rows(call.rows(), call.stream);
  if (ws.writes_codes()) call.for_saved(launch_save);

  ForwardParams params{};
  static_cast<Params&>(params) = call.params();
  params.o = output(args.o);
  params.lse = stats(args.lse);
  params.block_max = ws.block_max;
  launch_forward(params, call.stream);
  if (args.max_logit != nullptr)
    launch_max({.batch = call.batch,
                .h = static_cast<int>(p.h),
                .block_max = ws.block_max,
                .max_logit = args.max_logit},
               call.stream);
}

void backward(const Problem& p, const BackwardArgs& args, void* workspace) {
  const Call call(p, args, workspace);
  const Space& ws = call.ws;
  if (ws.reads_codes())
    call.for_saved(launch_load);
  else
    call.quantize();
  launch_tokens(call.queries(args.dout, ws.dout), call.stream);
  call.centre_logits();
  call.dq_keys();

  RowJob rows = call.rows();
  rows.lse2 = ws.lse2, rows.delta = ws.delta;
  rows.lse = stats(args.lse), rows.dlse = stats(args.dlse);
  rows.o = input(args.o), rows.dout = input(args.dout);
  launch_rows(rows, call.stream);

  BackwardParams params{};
  static_cast<Params&>(params) = call.params();
  params.dout = ws.dout;
  params.dq_k = ws.dq_k, params.dq_mean = ws.dq_mean;
  params.lse2 = ws.lse2, params.delta = ws.delta;
  params.turned_mean = ws.turned_mean != nullptr ? ws.turned_mean : ws.q_mean;
  params.dq_rows = ws.dq_rows, params.dk_rows = ws.dk_rows, params.row_sum = ws.row_sum;
  params.dlse = stats(args.dlse);
  params.partial_kv = p.partial_kv, params.sums_what_cap_takes = p.sums_what_cap_takes();
  params.dq = output(args.dq), params.dk = output(args.dk), params.dv = output(args.dv);
  launch_backward(params, call.stream);
}

}  // namespace sagebwd::cuda::plain
