// SPDX-License-Identifier: Apache-2.0
#include "dispatch/choose.h"

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "cpu/cpu.h"
#include "cpu/mix.h"
#include "ref/ref.h"
#ifdef SAGEBWD_HAS_CUDA
#include "cuda/cuda.h"
#endif

namespace sagebwd::dispatch {
namespace {

/// The pinned implementation's name, or null.
const char* pinned() {
  const char* name = std::getenv("SAGEBWD_IMPL");
  return name != nullptr && *name != '\0' ? name : nullptr;
}

}  // namespace

const std::vector<const Implementation*>& implementations() {
  static const std::vector<const Implementation*> list = [] {
    std::vector<const Implementation*> all = cpu::implementations();
#ifdef SAGEBWD_HAS_CUDA
    const std::vector<const Implementation*> gpu = cuda::implementations();
    all.insert(all.begin(), gpu.begin(), gpu.end());
#endif
    all.push_back(&ref::implementation());
    return all;
  }();
  return list;
}

std::vector<Candidate> explain(const spec::Problem& p) {
  std::vector<Candidate> out;
  const char* pin = pinned();
  bool chosen = false;
  for (const Implementation* impl : implementations()) {
    Candidate c;
    c.name = impl->name;
    c.reason = impl->decline(p);
    if (c.reason.empty() && pin != nullptr && c.name != pin)
      c.reason = std::string("SAGEBWD_IMPL pins ") + pin;
    c.supported = c.reason.empty();
    if (c.supported) {
      const Tiles t = impl->tiles(p);
      c.tile_q = t.q, c.tile_k = t.k, c.p_levels = t.p_levels, c.dk_q = t.dk_q;
      c.chosen = !chosen;
      chosen = true;
    }
    out.push_back(std::move(c));
  }
  return out;
}

namespace {

/// Throws with the reason that each implementation gave.
[[noreturn]] void refuse([[maybe_unused]] const spec::Problem& p, std::string refusals) {
#ifndef SAGEBWD_HAS_CUDA
  if (p.device == Device::cuda)
    refusals = std::string("\n  this build has no CUDA backend; ") + kHowToGetCuda + refusals;
#endif
  SAGE_THROW(ErrorKind::unsupported, "no implementation can serve this call:" << refusals);
}

}  // namespace

const Implementation& choose(const spec::Problem& p) {
  const char* pin = pinned();
  for (const Implementation* impl : implementations())
    if ((pin == nullptr || std::string(pin) == impl->name) && impl->decline(p).empty())
      return *impl;
  std::string refusals;
  for (const Candidate& c : explain(p)) refusals += "\n  " + c.name + ": " + c.reason;
  refuse(p, refusals);
}

const Implementation& choose_linear(const spec::Problem& p) {
  const char* pin = pinned();
  std::string refusals;
  for (const Implementation* impl : implementations()) {
    std::string reason =
        impl->linear_decline == nullptr ? "has no linear branch" : impl->linear_decline(p);
    if (reason.empty() && pin != nullptr && std::string(pin) != impl->name)
      reason = std::string("SAGEBWD_IMPL pins ") + pin;
    if (reason.empty()) return *impl;
    refusals += std::string("\n  ") + impl->name + ": " + reason;
  }
  refuse(p, refusals);
}

const backend::Mix& mix_on(Device device) {
  if (device == Device::cpu) return cpu::mix_calls();
#ifdef SAGEBWD_HAS_CUDA
  return cuda::mix_calls();
#else
  SAGE_THROW(ErrorKind::unsupported, "this build has no CUDA backend; " << kHowToGetCuda);
#endif
}

}  // namespace sagebwd::dispatch
