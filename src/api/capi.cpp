// SPDX-License-Identifier: Apache-2.0
// The C interface: structs in, the C++ calls, a status out. No exception leaves this file.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "sagebwd/attention.h"
#include "sagebwd/linear.h"
#include "sagebwd/sagebwd.h"
#include "spec/recipe_fields.h"

namespace sagebwd {
namespace {

// A fixed buffer, because reporting an error must not be able to fail.
thread_local char last_error[2048] = "";

int fail(int status, const char* message) {
  std::snprintf(last_error, sizeof(last_error), "%s", message);
  return status;
}

/// Runs `f` and turns whatever it throws into a status and a message.
template <typename F>
int guarded(F&& f) {
  try {
    f();
    return SAGEBWD_OK;
  } catch (const Error& e) {
    return fail(static_cast<int>(e.kind()), e.what());
  } catch (const std::bad_alloc&) {
    return fail(SAGEBWD_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return fail(SAGEBWD_INTERNAL, e.what());
  } catch (...) {
    return fail(SAGEBWD_INTERNAL, "unknown exception");
  }
}
static_assert(static_cast<int>(ErrorKind::invalid_argument) == SAGEBWD_INVALID_ARGUMENT);
static_assert(static_cast<int>(ErrorKind::unsupported) == SAGEBWD_UNSUPPORTED);
static_assert(static_cast<int>(ErrorKind::internal) == SAGEBWD_INTERNAL);

// What each struct is called in messages, and how far its required fields reach: a caller's struct
// may end anywhere behind them.
template <typename C>
struct Layout;
template <>
struct Layout<sagebwd_recipe> {
  static constexpr const char* kName = "recipe";
  static constexpr size_t kRequired = offsetof(sagebwd_recipe, tile_q);
};
template <>
struct Layout<sagebwd_block_lists> {
  static constexpr const char* kName = "block lists";
  static constexpr size_t kRequired = sizeof(sagebwd_block_lists);
};
template <>
struct Layout<sagebwd_forward_args> {
  static constexpr const char* kName = "forward args";
  static constexpr size_t kRequired = offsetof(sagebwd_forward_args, recipe);
};
template <>
struct Layout<sagebwd_backward_args> {
  static constexpr const char* kName = "backward args";
  static constexpr size_t kRequired = offsetof(sagebwd_backward_args, recipe);
};

template <>
struct Layout<sagebwd_linear_forward_args> {
  static constexpr const char* kName = "linear forward args";
  static constexpr size_t kRequired = offsetof(sagebwd_linear_forward_args, excluded);
};
template <>
struct Layout<sagebwd_linear_backward_args> {
  static constexpr const char* kName = "linear backward args";
  static constexpr size_t kRequired = offsetof(sagebwd_linear_backward_args, excluded);
};

/// No real struct comes near: a larger size is uninitialised memory, and following it would read
/// past the struct.
constexpr size_t kLargestSize = size_t{1} << 16;

/// A sizeof is a multiple of the alignment; anything else would end inside a pointer.
template <typename C>
void check_size(size_t size) {
  SAGE_CHECK(size >= Layout<C>::kRequired && size <= kLargestSize && size % alignof(C) == 0,
             Layout<C>::kName << ".size: expected " << sizeof(C) << " (sizeof the struct; at least "
                              << Layout<C>::kRequired << ", a multiple of " << alignof(C)
                              << "), got " << size);
}

sagebwd_recipe to_c(const Recipe& r) {
  sagebwd_recipe c{};
  spec::for_each_recipe_field([&](const auto& field) {
    using InC = std::remove_cvref_t<decltype(c.*field.c_member)>;
    c.*field.c_member = static_cast<InC>(r.*field.member);
  });
  return c;
}

/// What the fields a caller's struct does not reach mean.
sagebwd_recipe defaults(const sagebwd_recipe* caller) {
  return to_c(caller->scheme == SAGEBWD_SCHEME_PAPER ? Recipe::paper() : Recipe::vectorwise());
}

sagebwd_block_lists defaults(const sagebwd_block_lists*) {
  const BlockLists lists;
  sagebwd_block_lists c{};
  c.lead = lists.lead;
  c.block_q = lists.block_q;
  c.block_k = lists.block_k;
  return c;
}

template <typename C>
C linear_defaults() {
  C c{};
  const LinearArgs args;
  c.device = static_cast<int>(args.device);
  c.phi = static_cast<int>(args.phi);
  c.mean_free_keys = args.mean_free_keys;
  return c;
}
sagebwd_linear_forward_args defaults(const sagebwd_linear_forward_args*) {
  return linear_defaults<sagebwd_linear_forward_args>();
}
sagebwd_linear_backward_args defaults(const sagebwd_linear_backward_args*) {
  return linear_defaults<sagebwd_linear_backward_args>();
}

template <typename C>
C defaults(const C*) {
  C c{};
  const Mask mask;
  c.device = static_cast<int>(Device::cpu);
  c.align = static_cast<int>(mask.align);
  c.window_left = mask.window_left;
  c.window_right = mask.window_right;
  return c;
}

/// Writes a default struct into the first `size` bytes of the caller's, and zeros into what we do
/// not know of it.
template <typename C>
void initialise(C* caller, size_t size, C values) {
  values.size = size;
  values.version = SAGEBWD_STRUCT_VERSION;
  std::memset(static_cast<void*>(caller), 0, size);
  std::memcpy(static_cast<void*>(caller), &values, std::min(size, sizeof(C)));
}

/// The caller's struct at our size: missing fields take defaults, unknown ones must be zero.
template <typename C>
C read(const C* caller) {
  const char* name = Layout<C>::kName;
  SAGE_CHECK(caller != nullptr, name << ": expected a struct, got a null pointer");
  const size_t size = caller->size;
  check_size<C>(size);
  SAGE_CHECK(caller->version == SAGEBWD_STRUCT_VERSION,
             name << ".version: expected " << SAGEBWD_STRUCT_VERSION << ", got " << caller->version
                  << "; fill the struct with its _init function");
  const auto* bytes = reinterpret_cast<const unsigned char*>(caller);
  for (size_t i = sizeof(C); i < size; ++i)
    SAGE_CHECK(bytes[i] == 0, name << ": expected zeros beyond the " << sizeof(C)
                                   << " bytes that version " << version() << " knows, got "
                                   << static_cast<int>(bytes[i]) << " at byte " << i
                                   << ": the caller uses a field of a newer version");
  C c = defaults(caller);
  std::memcpy(static_cast<void*>(&c), caller, std::min(size, sizeof(C)));
  return c;
}

bool flag(const char* name, int32_t value) {
  SAGE_CHECK(value == 0 || value == 1, name << ": expected 0 or 1, got " << value);
  return value == 1;
}

void check_reserved(const char* name, int32_t value) {
  SAGE_CHECK(value == 0, name << ".reserved: expected 0, got " << value);
}

Recipe convert(const sagebwd_recipe& c) {
  // Of 0.1.0's previews: pv16_tiles, p_levels, k_per_token and smooth_v.
  check_reserved("recipe", c.reserved);
  check_reserved("recipe", c.reserved_2);
  check_reserved("recipe", c.reserved_3);
  check_reserved("recipe", c.reserved_4);
  Recipe r;
  spec::for_each_recipe_field([&](const auto& field) {
    using InCpp = std::remove_cvref_t<decltype(r.*field.member)>;
    if constexpr (std::is_same_v<InCpp, bool>)
      r.*field.member = flag(("recipe." + std::string(field.name)).c_str(), c.*field.c_member);
    else
      r.*field.member = static_cast<InCpp>(c.*field.c_member);
  });
  if (r.dithered == 0) r.dithered = kMatmulDitherable;
  return r;
}

BlockLists convert(const sagebwd_block_lists& c) {
  check_reserved("block lists", c.reserved);
  BlockLists lists;
  lists.index = c.index;
  lists.count = c.count;
  lists.offset = c.offset;
  lists.width = c.width;
  lists.rows = c.rows;
  lists.stride_batch = c.stride_batch;
  lists.stride_head = c.stride_head;
  lists.block_q = c.block_q;
  lists.block_k = c.block_k;
  lists.lead = c.lead;
  lists.on_device = flag("blocks.on_device", c.on_device);
  return lists;
}

TensorView convert(const char* name, const sagebwd_tensor& c) {
  check_reserved(name, c.reserved);
  TensorView t;
  t.data = c.data;
  t.dtype = static_cast<Dtype>(c.dtype);
  std::copy_n(c.shape, 4, t.shape.begin());
  std::copy_n(c.stride, 4, t.stride.begin());
  return t;
}

StatsView convert(const sagebwd_stats& c) {
  return {c.data, {c.stride[0], c.stride[1], c.stride[2]}};
}

/// The fields both directions have.
template <typename C>
void convert_shared(const C& c, AttentionArgs& a) {
  a.q = convert("q", c.q);
  a.k = convert("k", c.k);
  a.v = convert("v", c.v);
  a.o = convert("o", c.o);
  a.lse = convert(c.lse);
  a.scale = c.scale;
  a.softcap = c.softcap;
  a.mask.causal = flag("causal", c.causal);
  a.mask.align = static_cast<Align>(c.align);
  a.mask.window_left = c.window_left;
  a.mask.window_right = c.window_right;
  a.documents = {c.cu_q, c.cu_k, c.num_documents, flag("cu_on_device", c.cu_on_device)};
  if (c.recipe != nullptr) a.recipe = convert(read(c.recipe));
  if (c.blocks != nullptr) a.blocks = convert(read(c.blocks));
  a.device = static_cast<Device>(c.device);
  a.workspace = c.workspace;
  a.workspace_bytes = c.workspace_bytes;
  a.parallel_for = {c.parallel_for, c.parallel_context};
  a.stream = c.stream;
  a.codes = c.codes;
  a.codes_bytes = c.codes_bytes;
  check_reserved(Layout<C>::kName, c.reserved);
  check_reserved(Layout<C>::kName, c.reserved_2);
  check_reserved(Layout<C>::kName, c.reserved_3);
}

ForwardArgs convert(const sagebwd_forward_args* caller) {
  const sagebwd_forward_args c = read(caller);
  ForwardArgs a;
  convert_shared(c, a);
  a.max_logit = c.max_logit;
  return a;
}

BackwardArgs convert(const sagebwd_backward_args* caller) {
  const sagebwd_backward_args c = read(caller);
  BackwardArgs a;
  convert_shared(c, a);
  a.dout = convert("dout", c.dout);
  a.dq = convert("dq", c.dq);
  a.dk = convert("dk", c.dk);
  a.dv = convert("dv", c.dv);
  a.dlse = convert(c.dlse);
  a.partial_kv = flag("partial_kv", c.partial_kv);
  a.deterministic = flag("deterministic", c.deterministic);
  return a;
}

template <typename C>
void convert_linear(const C& c, LinearArgs& a) {
  a.q = convert("q", c.q);
  a.k = convert("k", c.k);
  a.v = convert("v", c.v);
  if (c.excluded != nullptr) a.excluded = convert(read(c.excluded));
  a.phi = static_cast<FeatureMap>(c.phi);
  a.mean_free_keys = flag("mean_free_keys", c.mean_free_keys);
  a.device = static_cast<Device>(c.device);
  a.workspace = c.workspace;
  a.workspace_bytes = c.workspace_bytes;
  a.parallel_for = {c.parallel_for, c.parallel_context};
  a.stream = c.stream;
}

LinearForwardArgs convert(const sagebwd_linear_forward_args* caller) {
  const sagebwd_linear_forward_args c = read(caller);
  LinearForwardArgs a;
  convert_linear(c, a);
  a.o = convert("o", c.o);
  a.norm = convert(c.norm);
  return a;
}

LinearBackwardArgs convert(const sagebwd_linear_backward_args* caller) {
  const sagebwd_linear_backward_args c = read(caller);
  LinearBackwardArgs a;
  convert_linear(c, a);
  a.dout = convert("dout", c.dout);
  a.dq = convert("dq", c.dq);
  a.dk = convert("dk", c.dk);
  a.dv = convert("dv", c.dv);
  a.dnorm = convert(c.dnorm);
  return a;
}

std::string describe(const std::vector<Candidate>& candidates) {
  std::string text;
  for (const Candidate& c : candidates) {
    text += c.name + ": ";
    if (c.supported) {
      text += c.chosen ? "chosen" : "able";
      text += ", tiles " + c.tiles();
    } else {
      text += "declines, " + c.reason;
    }
    text += "\n";
  }
  return text;
}

template <typename C>
int init_args(C* args, size_t size) {
  return guarded([&] {
    SAGE_CHECK(args != nullptr, Layout<C>::kName << ": expected a struct, got a null pointer");
    check_size<C>(size);
    initialise(args, size, defaults(args));
  });
}

template <typename C>
int workspace_size_of(const C* args, size_t* bytes) {
  return guarded([&] {
    SAGE_CHECK(bytes != nullptr, "bytes: expected a place for the result, got a null pointer");
    *bytes = workspace_size(convert(args));
  });
}

template <typename C>
int explain_into(const C* args, char* text, size_t capacity, size_t* length) {
  return guarded([&] {
    SAGE_CHECK(text != nullptr || capacity == 0,
               "text: expected a buffer of " << capacity << " bytes, got a null pointer");
    const std::string whole = describe(explain(convert(args)));
    if (length != nullptr) *length = whole.size();
    if (capacity > 0) {
      const size_t n = std::min(capacity - 1, whole.size());
      std::memcpy(text, whole.data(), n);
      text[n] = '\0';
    }
  });
}

}  // namespace
}  // namespace sagebwd

extern "C" {

const char* sagebwd_version(void) { return sagebwd::version(); }

const char* sagebwd_last_error(void) { return sagebwd::last_error; }

int sagebwd_recipe_init(sagebwd_recipe* recipe, size_t size, const char* text) {
  return sagebwd::guarded([&] {
    SAGE_CHECK(recipe != nullptr, "recipe: expected a struct, got a null pointer");
    SAGE_CHECK(text != nullptr, "recipe: expected paper or vectorwise, got a null pointer");
    sagebwd::check_size<sagebwd_recipe>(size);
    sagebwd::initialise(recipe, size, sagebwd::to_c(sagebwd::parse_recipe(text)));
  });
}

int sagebwd_block_lists_init(sagebwd_block_lists* lists, size_t size) {
  return sagebwd::init_args(lists, size);
}
int sagebwd_forward_args_init(sagebwd_forward_args* args, size_t size) {
  return sagebwd::init_args(args, size);
}
int sagebwd_backward_args_init(sagebwd_backward_args* args, size_t size) {
  return sagebwd::init_args(args, size);
}
int sagebwd_linear_forward_args_init(sagebwd_linear_forward_args* args, size_t size) {
  return sagebwd::init_args(args, size);
}
int sagebwd_linear_backward_args_init(sagebwd_linear_backward_args* args, size_t size) {
  return sagebwd::init_args(args, size);
}

int sagebwd_forward_workspace_size(const sagebwd_forward_args* args, size_t* bytes) {
  return sagebwd::workspace_size_of(args, bytes);
}
int sagebwd_backward_workspace_size(const sagebwd_backward_args* args, size_t* bytes) {
  return sagebwd::workspace_size_of(args, bytes);
}
int sagebwd_linear_forward_workspace_size(const sagebwd_linear_forward_args* args, size_t* bytes) {
  return sagebwd::workspace_size_of(args, bytes);
}
int sagebwd_linear_backward_workspace_size(const sagebwd_linear_backward_args* args,
                                           size_t* bytes) {
  return sagebwd::workspace_size_of(args, bytes);
}

int sagebwd_codes_size(const sagebwd_forward_args* args, size_t* bytes) {
  return sagebwd::guarded([&] {
    SAGE_CHECK(bytes != nullptr, "bytes: expected a place for the result, got a null pointer");
    *bytes = sagebwd::codes_size(sagebwd::convert(args));
  });
}

int sagebwd_forward(const sagebwd_forward_args* args) {
  return sagebwd::guarded([&] { sagebwd::forward(sagebwd::convert(args)); });
}
int sagebwd_backward(const sagebwd_backward_args* args) {
  return sagebwd::guarded([&] { sagebwd::backward(sagebwd::convert(args)); });
}

int sagebwd_linear_forward(const sagebwd_linear_forward_args* args) {
  return sagebwd::guarded([&] { sagebwd::linear_forward(sagebwd::convert(args)); });
}
int sagebwd_linear_backward(const sagebwd_linear_backward_args* args) {
  return sagebwd::guarded([&] { sagebwd::linear_backward(sagebwd::convert(args)); });
}

int sagebwd_explain_forward(const sagebwd_forward_args* args, char* text, size_t capacity,
                            size_t* length) {
  return sagebwd::explain_into(args, text, capacity, length);
}
int sagebwd_explain_backward(const sagebwd_backward_args* args, char* text, size_t capacity,
                             size_t* length) {
  return sagebwd::explain_into(args, text, capacity, length);
}

}  // extern "C"
