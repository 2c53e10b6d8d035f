// SPDX-License-Identifier: Apache-2.0
// The options of attention's operators, declared once: an operator's schema, its arguments, the
// struct that they make, and what autograd keeps of them come from this list. Options of
// python/sagebwd/ops.py has the same names in the same order, which a test compares.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace sagebwd::binding {

using torch::stable::Tensor;

/// X(type in a schema, type in C++, name, default)
#define SAGEBWD_OPTIONS(X)                                                   \
  X("Tensor?", std::optional<Tensor>, cu_seqlens_q, std::nullopt)            \
  X("Tensor?", std::optional<Tensor>, cu_seqlens_k, std::nullopt)            \
  X("SymInt", int64_t, max_seqlen_q, -1) /* not given */                     \
  X("SymInt", int64_t, max_seqlen_k, -1)                                     \
  X("float?", std::optional<double>, softmax_scale, std::nullopt)            \
  X("bool", bool, causal, false)                                             \
  X("bool", bool, top_left, false)                                           \
  X("SymInt", int64_t, window_left, -1)                                      \
  X("SymInt", int64_t, window_right, -1)                                     \
  X("str", std::string, recipe, "vectorwise")                                \
  X("SymInt", int64_t, seed, 0) /* the bits of the recipe's unsigned seed */ \
  X("Tensor?", std::optional<Tensor>, list_index, std::nullopt)              \
  X("Tensor?", std::optional<Tensor>, list_count, std::nullopt)              \
  X("SymInt", int64_t, block_q, 128)                                         \
  X("SymInt", int64_t, block_k, 64)                                          \
  X("SymInt", int64_t, lead, 1)                                              \
  X("float", double, softcap, 0.0) /* none */

/// The arguments that forward and backward share, as they come through the operator.
struct Options {
#define SAGEBWD_MEMBER(schema, type, name, usual) type name = usual;
  SAGEBWD_OPTIONS(SAGEBWD_MEMBER)
#undef SAGEBWD_MEMBER
  bool tokens_first = false;  // tensors without documents are [b, n, h, d], else [b, h, n, d]
};

// A list of them, with a comma after each: in a schema, as the arguments of a function, and to make
// Options of these.
#define SAGEBWD_IN_SCHEMA(schema, type, name, usual) schema " " #name ", "
#define SAGEBWD_AS_ARGUMENT(schema, type, name, usual) type name,
#define SAGEBWD_BY_NAME(schema, type, name, usual) name,

}  // namespace sagebwd::binding
