// SPDX-License-Identifier: Apache-2.0
// A recipe says which values share a quantisation scale, and every switch that changes the numbers.
// docs/numerics.md explains each entry and what it costs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sagebwd/types.h"

namespace sagebwd {

/// Which values each INT8 scale covers.
enum class Scheme : int {
  // One scale per block of Q, K, V and dO, and one per tile of P and dS (arXiv 2603.02170).
  paper = 0,
  // One scale per token of Q, K, V and dO; P and dS per key for dV and dK, dS per query for dQ. dP
  // is made from the codes of V, so dS is the gradient of what the forward computed. What rounds a
  // token depends on earlier tokens alone, so that under a causal mask later tokens change no bit
  // of earlier outputs.
  vectorwise = 1,
};

/// Keys that share a centre of K and one of V in `vectorwise`, counted from the first key of a
/// document.
inline constexpr int kKeysPerScale = 128;

enum class Rounding : int {
  nearest = 0,
  dither = 1,  // unbiased: a replayable low-discrepancy offset instead of 1/2 for P and dS
};

/// The seven matmuls, as bits of Recipe::high_precision.
enum Matmul : uint32_t {
  kMatmulS = 1u << 0,           // S = QKᵀ in the forward
  kMatmulO = 1u << 1,           // O = PV
  kMatmulSRecompute = 1u << 2,  // S' = QKᵀ again in the backward
  kMatmulDV = 1u << 3,          // dV = PᵀdO
  kMatmulDP = 1u << 4,          // dP = dOVᵀ; never INT8. The bit forbids a 16-bit implementation
  kMatmulDQ = 1u << 5,          // dQ = dSK
  kMatmulDK = 1u << 6,          // dK = dSᵀQ
  kMatmulAll = (1u << 7) - 1,
};

/// Matmuls with an operand that is made inside the kernel (P or dS) and can be dithered.
inline constexpr uint32_t kMatmulDitherable = kMatmulO | kMatmulDV | kMatmulDQ | kMatmulDK;

struct Recipe {
  Scheme scheme = Scheme::vectorwise;
  int tile_q = 0;  // queries per tile, a multiple of 64 up to 256; 0: the backend's own choice
  int tile_k = 0;  // keys per tile, likewise
  bool smooth_k = true;  // subtract a mean key (exact), in `paper` of all keys; in `vectorwise` of
                         // earlier ones, and a mean of their values from V
  bool smooth_q =
      false;           // `paper`: subtract the mean query of each block (exact; costs a bias row)
  bool rotate = true;  // rotate Q and K before they are quantised (exact; numerics/rotate.h)
  Rounding rounding = Rounding::nearest;
  uint32_t dithered = kMatmulDitherable;  // Matmul bits that Rounding::dither applies to
  uint64_t seed = 0;            // of dither; the same seed gives the same bits (dQ on a GPU: in
                                // deterministic mode)
  uint32_t high_precision = 0;  // Matmul bits to lift out of INT8

  /// The published method: tiles of 128 x 64, K-smoothing, all of P·V in INT8.
  static Recipe paper() {
    Recipe r;
    r.scheme = Scheme::paper;
    r.tile_q = 128;
    r.tile_k = 64;
    r.rotate = false;
    return r;
  }
  /// The default: gradient error that does not grow with the batch, robust to attention sinks, to
  /// outlier channels and to keys of very different lengths. No later token touches an earlier one.
  static Recipe vectorwise() { return {}; }

  /// Whether the codes of P or dS that go into a matmul are dithered.
  bool dithers(Matmul m) const { return rounding == Rounding::dither && (dithered & m) != 0; }
};

SAGEBWD_API const char* scheme_name(Scheme s);
/// A recipe of its name and the switches that differ from it, as in case strings: "paper",
/// "vectorwise smooth_k=off rounding=dither:dQ lift=dQ,dK tile=64x128". The seed is no
/// part of it. Throws Error(invalid_argument) that names what it does not know.
SAGEBWD_API Recipe parse_recipe(std::string_view text);
/// The shortest such text.
SAGEBWD_API std::string recipe_text(const Recipe& r);

/// Name of one matmul bit: S, O, S', dV, dP, dQ, dK. Null for anything that is not exactly one of
/// the bits.
SAGEBWD_API const char* matmul_name(uint32_t bit);

}  // namespace sagebwd
