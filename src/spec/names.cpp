// SPDX-License-Identifier: Apache-2.0
// Names of the public enums.
#include "sagebwd/attention.h"
#include "sagebwd/version.h"

namespace sagebwd {

const char* dtype_name(Dtype t) {
  switch (t) {
    case Dtype::f32:
      return "f32";
    case Dtype::bf16:
      return "bf16";
    case Dtype::f16:
      return "f16";
  }
  return "unknown";
}

const char* scheme_name(Scheme s) {
  switch (s) {
    case Scheme::paper:
      return "paper";
    case Scheme::vectorwise:
      return "vectorwise";
  }
  return "unknown";
}

const char* matmul_name(uint32_t bit) {
  switch (bit) {
    case kMatmulS:
      return "S";
    case kMatmulO:
      return "O";
    case kMatmulSRecompute:
      return "S'";
    case kMatmulDV:
      return "dV";
    case kMatmulDP:
      return "dP";
    case kMatmulDQ:
      return "dQ";
    case kMatmulDK:
      return "dK";
    default:
      return nullptr;
  }
}

const char* version() { return SAGEBWD_VERSION_STRING; }

}  // namespace sagebwd
