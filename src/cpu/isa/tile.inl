// SPDX-License-Identifier: Apache-2.0
// The work between the products: softmax, its gradient, and quantisation of P and dS. Included once
// per instruction set, inside its namespace, after its vec_*.h.
//
// A tile is processed in strips of 64 queries: four vectors of per-query state stay in registers
// while the loop runs down the keys. Functions of a strip take the tile by value: then the compiler
// knows that no store changes it.

inline constexpr int kVecs = kStrip / kPanel;

/// 2^x, relative error about 1e-7; exactly 0 below -126.5; NaN stays NaN. x must not exceed 127.
inline Vec exp2_nonpositive(Vec x) {
  // Adding 1.5·2^23 + 127 leaves round(x) + 127 in the low bits: shifted, they are the exponent of
  // 2^round(x).
  const Vec magic = set1(0x1.8p23f + 127.0f);
  x = max(set1(-127.0f), x);
  const Vec t = add(x, magic);
  const Vec r = sub(x, sub(t, magic));
  Vec y = set1(1.535336188319500e-4f);
  y = fma(y, r, set1(1.339887440266574e-3f));
  y = fma(y, r, set1(9.618437357674640e-3f));
  y = fma(y, r, set1(5.550332471162809e-2f));
  y = fma(y, r, set1(2.402264791363012e-1f));
  y = fma(y, r, set1(6.931472028550421e-1f));
  y = fma(y, r, set1(1.0f));
  return mul(y, as_float(shift_left_23(as_int(t))));
}

/// As above for any x; saturates to Inf.
inline Vec exp2_any(Vec x) { return exp2_nonpositive(min(set1(128.0f), x)); }

/// A capped logit and the derivative of the cap (numerics/softcap.h).
struct Capped {
  Vec logit, slope;
};

/// Relative error of both below 5e-7; NaN stays NaN.
inline Capped cap_logit(numerics::Softcap c, Vec x) {
  const Vec one = set1(1.0f), u = mul(x, set1(c.inverse));
  const Vec e = exp2_nonpositive(mul(as_float(magnitude_bits(x)), set1(c.decay)));
  const Vec inverse = div(one, add(one, e));
  const Vec far = sub(one, mul(add(e, e), inverse));  // of |u|
  // Where e is near one that difference has lost its digits: an odd polynomial of u, fitted to
  // tanh for |u| < 0.6.
  const Vec square = mul(u, u);
  Vec y = set1(-5.895156413316727e-3f);
  y = fma(y, square, set1(2.0795971155166626e-2f));
  y = fma(y, square, set1(-5.3783830255270004e-2f));
  y = fma(y, square, set1(1.3331924378871918e-1f));
  y = fma(y, square, set1(-3.3333298563957214e-1f));
  const Vec near = fma(mul(y, square), u, u);
  const Vec zero = set1(0.0f), signed_far = select(greater(zero, u), sub(zero, far), far);
  const Mask is_far = greater(as_float(magnitude_bits(u)), set1(0.6f));
  return {mul(select(is_far, signed_far, near), set1(c.cap)),
          mul(mul(set1(4.0f), e), mul(inverse, inverse))};
}

struct Scales {
  Vec scale, inverse;
};

/// numerics::scale_of and inverse_of of sixteen magnitudes, given as bits.
inline Scales scales_of(IVec amax_bits, float levels) {
  const Vec amax = as_float(amax_bits);
  const Vec zero = set1(0.0f);
  const Mask alive =
      greater(amax, set1(numerics::kZeroAmax * (1.0f - 0x1p-24f)));  // amax >= 2^-100
  const Mask small = greater(set1(__builtin_inff()), amax);          // finite
  Vec s = select(alive, div(amax, set1(levels)), zero);
  const Vec inverse = select(small, select(alive, div(set1(1.0f), s), zero), zero);
  // Inf and NaN: neither zero nor finite.
  s = select(small, s, set1(__builtin_nanf("")));
  return {s, inverse};
}

template <bool kDither>
inline IVec make_code(Vec y, Vec dither_query, float dither_key, float levels) {
  if constexpr (!kDither) return round_to_int(y);
  Vec t = add(dither_query, set1(dither_key));
  t = select(greater(set1(1.0f), t), t, sub(t, set1(1.0f)));
  const Vec c = floor(add(y, t));
  return round_to_int(min(set1(levels), max(set1(-levels), c)));
}

template <bool kFloatScores>
inline Vec load_scores(const void* s, int64_t at) {
  if constexpr (kFloatScores) return load(static_cast<const float*>(s) + at);
  return to_float(load(static_cast<const int32_t*>(s) + at));
}

// The forward.

/// Logits in log2 units with the logarithm of V's scale into t.s, and their maximum per query.
template <bool kFloatScores, bool kMasked, bool kCapped, bool kShifted>
inline void forward_logits(ForwardTile t, int g, Vec (&tile_max)[kVecs]) {
  Vec logit_factor[kVecs], shift[kVecs];
  IVec begin[kVecs], end[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    logit_factor[v] = load(t.logit_factor + g + v * kPanel);
    if constexpr (kShifted) shift[v] = load(t.shift + g + v * kPanel);
    tile_max[v] = set1(-__builtin_inff());
    if constexpr (kMasked) {
      begin[v] = load(t.begin + g + v * kPanel);
      end[v] = load(t.end + g + v * kPanel);
    }
  }
  for (int j = 0; j < t.tile_k; ++j) {
    const Vec k_scale = set1(t.k_scale[j]);
    const float mean_query = t.bias != nullptr ? t.bias[j] : 0.0f;
    const Vec bias = set1(kCapped ? mean_query : t.v_log2[j] + mean_query);
    const int64_t row = static_cast<int64_t>(j) * t.tile_q + g;
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      Vec x = load_scores<kFloatScores>(t.s, row + v * kPanel);
      x = fma(mul(x, k_scale), logit_factor[v], bias);
      if constexpr (kShifted) x = add(x, shift[v]);
      if constexpr (kCapped) x = add(cap_logit(t.cap, x).logit, set1(t.v_log2[j]));
      if constexpr (kMasked) x = select(in_range(begin[v], end[v], j), x, set1(-__builtin_inff()));
      tile_max[v] = max(x, tile_max[v]);  // a NaN is dropped here and comes back through the sum
      store(static_cast<float*>(t.s) + row + v * kPanel, x);
    }
  }
}

template <bool kFloatScores, bool kCapped, bool kShifted>
inline void forward_strip_logits(const ForwardTile& t, int g, Vec (&tile_max)[kVecs]) {
  t.begin != nullptr ? forward_logits<kFloatScores, true, kCapped, kShifted>(t, g, tile_max)
                     : forward_logits<kFloatScores, false, kCapped, kShifted>(t, g, tile_max);
}

template <bool kFloatScores, bool kCapped>
inline void forward_strip_logits(const ForwardTile& t, int g, Vec (&tile_max)[kVecs]) {
  t.shift != nullptr ? forward_strip_logits<kFloatScores, kCapped, true>(t, g, tile_max)
                     : forward_strip_logits<kFloatScores, kCapped, false>(t, g, tile_max);
}

/// The running maximum of the logits themselves, without V's scale.
inline void track_logits(ForwardTile t, int g) {
  for (int at = g; at < g + kStrip; at += kPanel) {
    Vec top = load(t.logit_max + at);
    for (int j = 0; j < t.tile_k; ++j) {
      const Vec x = load(static_cast<const float*>(t.s) + static_cast<int64_t>(j) * t.tile_q + at);
      top = max(sub(x, set1(t.v_log2[j])), top);
    }
    store(t.logit_max + at, top);
  }
}

/// exp2(logit - maximum), its sum without V's scale, and either codes (quads along keys) or, with
/// kKeepFloat, the values themselves.
template <bool kKeepFloat, bool kDither>
inline void forward_probabilities(ForwardTile t, int g, const Vec (&tile_max)[kVecs],
                                  Vec (&sum)[kVecs]) {
  Vec shift[kVecs], dither[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    // A query that sees no key of this tile has maximum -inf; 0 keeps -inf - max at -inf.
    shift[v] = select(greater(tile_max[v], set1(-__builtin_inff())), tile_max[v], set1(0.0f));
    sum[v] = set1(0.0f);
    if constexpr (kDither) dither[v] = load(t.dither_query + g + v * kPanel);
  }
  float* s = static_cast<float*>(t.s);
  const Vec levels = set1(t.p_levels);
  const int64_t panel_bytes = static_cast<int64_t>(t.tile_k) * kPanel;
  for (int j = 0; j < t.tile_k; j += 4) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      IVec code[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const int64_t at = static_cast<int64_t>(j + r) * t.tile_q + g + v * kPanel;
        const Vec p = exp2_nonpositive(sub(load(s + at), shift[v]));
        sum[v] = fma(p, set1(t.v_inverse[j + r]), sum[v]);
        if constexpr (kKeepFloat) {
          store(s + at, p);
        } else {
          const float key_term = kDither ? numerics::dither_key_term(j + r, t.dither_u) : 0.0f;
          code[r] = make_code<kDither>(mul(p, levels), dither[v], key_term, t.p_levels);
        }
      }
      if constexpr (!kKeepFloat) {
        char* quads = static_cast<char*>(t.p8) + (g / kPanel + v) * panel_bytes + j * kPanel;
        store_quads(quads, code[0], code[1], code[2], code[3]);
      }
    }
  }
}

inline void forward_tile(const ForwardTile& t) {
  for (int g = 0; g < t.tile_q; g += kStrip) {
    Vec tile_max[kVecs], sum[kVecs];
    if (t.cap.on())
      t.s_is_float ? forward_strip_logits<true, true>(t, g, tile_max)
                   : forward_strip_logits<false, true>(t, g, tile_max);
    else
      t.s_is_float ? forward_strip_logits<true, false>(t, g, tile_max)
                   : forward_strip_logits<false, false>(t, g, tile_max);
    if (t.logit_max != nullptr) track_logits(t, g);
    if (t.p_float)
      forward_probabilities<true, false>(t, g, tile_max, sum);
    else if (t.dither_query != nullptr)
      forward_probabilities<false, true>(t, g, tile_max, sum);
    else
      forward_probabilities<false, false>(t, g, tile_max, sum);
    for (int v = 0; v < kVecs; ++v) {
      const int at = g + v * kPanel;
      const Vec m = load(t.m + at);
      const Vec m_new = max(tile_max[v], m);
      const Vec shift = select(greater(m_new, set1(-__builtin_inff())), m_new, set1(0.0f));
      const Vec alpha = exp2_nonpositive(sub(m, shift));
      const Vec beta = exp2_nonpositive(sub(tile_max[v], shift));
      store(t.l + at, add(mul(load(t.l + at), alpha), mul(sum[v], beta)));
      store(t.m + at, m_new);
      store(t.alpha + at, alpha);
      store(t.beta + at, beta);
    }
  }
}

// The backward.

/// P, dS, and the largest folded magnitudes per query (registers) and per key (sixteen partial
/// maxima each).
template <bool kFloatScores, bool kMasked, bool kCapped, bool kShifted>
inline void backward_gradients(BackwardTile t, int g) {
  Vec logit_factor[kVecs], lse2[kVecs], minus_delta[kVecs], q_scale[kVecs], do_scale[kVecs],
      sum[kVecs], shift[kVecs];
  IVec begin[kVecs], end[kVecs], query_max[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    const int at = g + v * kPanel;
    logit_factor[v] = load(t.logit_factor + at);
    lse2[v] = load(t.lse2 + at);
    if constexpr (kShifted) shift[v] = load(t.shift + at);
    minus_delta[v] = sub(set1(0.0f), load(t.delta + at));
    q_scale[v] = t.dk_float ? set1(1.0f) : load(t.q_scale + at);
    do_scale[v] = t.dv_float ? set1(1.0f) : load(t.do_scale + at);
    query_max[v] = set1(0);
    sum[v] = set1(0.0f);
    if constexpr (kMasked) {
      begin[v] = load(t.begin + at);
      end[v] = load(t.end + at);
    }
  }
  for (int j = 0; j < t.tile_k; ++j) {
    const Vec k_scale = set1(t.k_scale[j]);
    const Vec k_fold = set1(t.k_fold[j]), v_scale = set1(t.v_scale[j]);
    const Vec bias = set1(t.bias != nullptr ? t.bias[j] : 0.0f);
    const int64_t row = static_cast<int64_t>(j) * t.tile_q + g;
    IVec p_max = set1(0), ds_max = set1(0);
    Vec key_sum = set1(0.0f);
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = row + v * kPanel;
      Vec x = fma(mul(load_scores<kFloatScores>(t.s, at), k_scale), logit_factor[v], bias);
      if constexpr (kShifted) x = add(x, shift[v]);
      Vec slope;
      if constexpr (kCapped) {
        const Capped y = cap_logit(t.cap, x);
        x = y.logit, slope = y.slope;
      }
      const Vec p = exp2_any(sub(x, lse2[v]));
      Vec p_fold = mul(p, do_scale[v]);
      Vec ds = mul(p, fma(load(t.dp + at), v_scale, minus_delta[v]));
      Vec taken;
      if constexpr (kCapped) {
        const Vec before = ds;
        ds = mul(ds, slope);
        taken = sub(before, ds);
      }
      const Vec magnitude = as_float(magnitude_bits(ds));
      Vec ds_key = mul(magnitude, q_scale[v]);
      Vec ds_query = mul(magnitude, k_fold);
      if constexpr (kMasked) {
        // After every product, so that 0 · NaN of a masked pair cannot leak.
        const Mask visible = in_range(begin[v], end[v], j);
        const Vec zero = set1(0.0f);
        p_fold = select(visible, p_fold, zero);
        ds = select(visible, ds, zero);
        if constexpr (kCapped) taken = select(visible, taken, zero);
        ds_key = select(visible, ds_key, zero);
        ds_query = select(visible, ds_query, zero);
      }
      // All three are non-negative; a NaN of either sign is the largest pattern.
      p_max = max_unsigned(p_max, as_int(p_fold));
      ds_max = max_unsigned(ds_max, as_int(ds_key));
      query_max[v] = max_unsigned(query_max[v], as_int(ds_query));
      if (t.key_sum != nullptr) key_sum = add(key_sum, ds);
      if (t.query_sum != nullptr) {
        if constexpr (kCapped)
          sum[v] = add(sum[v], t.sums_what_cap_takes ? taken : ds);
        else
          sum[v] = add(sum[v], ds);
      }
      store(static_cast<float*>(t.s) + at, p_fold);
      store(t.dp + at, ds);
    }
    int32_t* partial = t.key_max + j * kPanel;
    int32_t* partial_ds = partial + t.tile_k * kPanel;
    if (g > 0) {
      p_max = max_unsigned(p_max, load(partial));
      ds_max = max_unsigned(ds_max, load(partial_ds));
    }
    store(partial, p_max);
    store(partial_ds, ds_max);
    if (t.key_sum != nullptr) t.key_sum[j] = (g > 0 ? t.key_sum[j] : 0.0f) + reduce_add(key_sum);
  }
  for (int v = 0; v < kVecs; ++v) {
    const int at = g + v * kPanel;
    store(reinterpret_cast<int32_t*>(t.ds_query_scale) + at, query_max[v]);  // maxima for now
    if (t.query_sum != nullptr) store(t.query_sum + at, add(load(t.query_sum + at), sum[v]));
  }
}

template <bool kFloatScores, bool kCapped, bool kShifted>
inline void strip_gradients(const BackwardTile& t, int g) {
  t.begin != nullptr ? backward_gradients<kFloatScores, true, kCapped, kShifted>(t, g)
                     : backward_gradients<kFloatScores, false, kCapped, kShifted>(t, g);
}

template <bool kFloatScores, bool kCapped>
inline void strip_gradients(const BackwardTile& t, int g) {
  t.shift != nullptr ? strip_gradients<kFloatScores, kCapped, true>(t, g)
                     : strip_gradients<kFloatScores, kCapped, false>(t, g);
}

/// In `paper` all keys or queries of a tile share the largest finite maximum; a poisoned one keeps
/// its NaN.
inline void share_maximum(int32_t* bits, int n) {
  int32_t largest = 0;
  for (int i = 0; i < n; ++i)
    if (bits[i] >= 0 && bits[i] < 0x7f800000 && bits[i] > largest) largest = bits[i];
  for (int i = 0; i < n; ++i)
    if (bits[i] >= 0 && bits[i] < 0x7f800000) bits[i] = largest;
}

/// Replaces maxima by scales and writes the inverses.
inline void finish_scales(float* scale, float* inverse, int n, bool per_vector, float levels) {
  int32_t* bits = reinterpret_cast<int32_t*>(scale);
  if (!per_vector) share_maximum(bits, n);
  for (int i = 0; i < n; i += kPanel) {
    const Scales s = scales_of(load(bits + i), levels);
    store(scale + i, s.scale);
    store(inverse + i, s.inverse);
  }
}

/// Codes of P for dV and of dS for dK, left operands [keys][queries].
template <bool kDitherP, bool kDitherDs>
inline void key_codes(BackwardTile t, int g, const float* p_inverse, const float* ds_inverse) {
  Vec q_scale[kVecs], dither[kVecs];
#pragma GCC unroll 4
  for (int v = 0; v < kVecs; ++v) {
    q_scale[v] = load(t.q_scale + g + v * kPanel);
    if constexpr (kDitherP || kDitherDs) dither[v] = load(t.dither_query + g + v * kPanel);
  }
  for (int j = 0; j < t.tile_k; ++j) {
    const int64_t row = static_cast<int64_t>(j) * t.tile_q + g;
    const float p_term = kDitherP ? numerics::dither_key_term(j, t.dither_p.u) : 0.0f;
    const float ds_term = kDitherDs ? numerics::dither_key_term(j, t.dither_ds_key.u) : 0.0f;
    const Vec p_factor = set1(p_inverse[j]), ds_factor = set1(ds_inverse[j]);
    IVec p8[kVecs], ds8[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      const Vec p = load(static_cast<const float*>(t.s) + row + v * kPanel);
      const Vec ds = load(t.dp + row + v * kPanel);
      p8[v] = make_code<kDitherP>(mul(p, p_factor), dither[v], p_term, t.p_levels);
      ds8[v] = make_code<kDitherDs>(mul(mul(ds, q_scale[v]), ds_factor), dither[v], ds_term,
                                    numerics::kLevels);
    }
    store_unsigned(static_cast<uint8_t*>(t.p8) + row, p8);
    store_codes(static_cast<int8_t*>(t.ds8_key) + row, ds8, kFlip);
  }
}

/// Codes of dS for dQ, right operand: quads along keys.
template <bool kDither>
inline void query_codes(BackwardTile t, int g, const float* inverse) {
  const int64_t panel_bytes = static_cast<int64_t>(t.tile_k) * kPanel;
  for (int at = g; at < g + kStrip; at += kPanel) {
    const Vec factor = load(inverse + at);
    const Vec dither = kDither ? load(t.dither_query + at) : factor;
    char* quads = static_cast<char*>(t.ds8_query) + at / kPanel * panel_bytes;
    IVec code_sum = set1(0);
    for (int j = 0; j < t.tile_k; j += 4) {
      IVec code[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const Vec ds = load(t.dp + static_cast<int64_t>(j + r) * t.tile_q + at);
        const float term = kDither ? numerics::dither_key_term(j + r, t.dither_ds_query.u) : 0.0f;
        code[r] = make_code<kDither>(mul(mul(ds, set1(t.k_fold[j + r])), factor), dither, term,
                                     numerics::kLevels);
      }
      store_quads(quads + j * kPanel, code[0], code[1], code[2], code[3]);
      if constexpr (kFlip != 0)
        code_sum = add(code_sum, add(add(code[0], code[1]), add(code[2], code[3])));
    }
    if constexpr (kFlip != 0) store(t.ds_query_start + at, start_of(code_sum));
  }
}

inline void backward_codes(const BackwardTile& t, const float* p_inverse, const float* key_inverse,
                           const float* query_inverse) {
  const auto by_key = t.dither_p.on
                          ? (t.dither_ds_key.on ? key_codes<true, true> : key_codes<true, false>)
                          : (t.dither_ds_key.on ? key_codes<false, true> : key_codes<false, false>);
  const auto by_query = t.dither_ds_query.on ? query_codes<true> : query_codes<false>;
  for (int g = 0; g < t.tile_q; g += kStrip) {
    by_key(t, g, p_inverse, key_inverse);
    by_query(t, g, query_inverse);
  }
}

inline void backward_tile(const BackwardTile& t) {
  for (int g = 0; g < t.tile_q; g += kStrip) {
    if (t.cap.on())
      t.s_is_float ? strip_gradients<true, true>(t, g) : strip_gradients<false, true>(t, g);
    else
      t.s_is_float ? strip_gradients<true, false>(t, g) : strip_gradients<false, false>(t, g);
  }
  if (t.dv_float && t.dk_float && t.dq_float) return;
  for (int j = 0; j < t.tile_k; ++j) {
    const int32_t* partial = t.key_max + j * kPanel;
    reinterpret_cast<uint32_t*>(t.p_scale)[j] = reduce_max_unsigned(load(partial));
    reinterpret_cast<uint32_t*>(t.ds_key_scale)[j] =
        reduce_max_unsigned(load(partial + t.tile_k * kPanel));
  }
  float p_inverse[256], key_inverse[256], query_inverse[256];
  finish_scales(t.p_scale, p_inverse, t.tile_k, t.per_vector, t.p_levels);
  finish_scales(t.ds_key_scale, key_inverse, t.tile_k, t.per_vector, numerics::kLevels);
  finish_scales(t.ds_query_scale, query_inverse, t.tile_q, t.per_vector, numerics::kLevels);
  backward_codes(t, p_inverse, key_inverse, query_inverse);
}
