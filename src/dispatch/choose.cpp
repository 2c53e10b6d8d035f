// SPDX-License-Identifier: Apache-2.0
#include "dispatch/choose.h"

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "cpu/cpu.h"
#include "cpu/sla2/sla2.h"
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
[[noreturn]] void refuse([[maybe_unused]] Device device, std::string refusals) {
#ifndef SAGEBWD_HAS_CUDA
  if (device == Device::cuda)
    refusals = std::string("\n  this build has no CUDA backend; ") + kHowToGetCuda + refusals;
#endif
  SAGE_THROW(ErrorKind::unsupported, "no implementation can serve this call:" << refusals);
}

}  // namespace

const Implementation* find(const spec::Problem& p) {
  const char* pin = pinned();
  for (const Implementation* impl : implementations())
    if ((pin == nullptr || std::string(pin) == impl->name) && impl->decline(p).empty()) return impl;
  return nullptr;
}

namespace {

std::string refusals(const spec::Problem& p) {
  std::string text;
  for (const Candidate& c : explain(p)) text += "\n  " + c.name + ": " + c.reason;
  return text;
}

}  // namespace

const Implementation& choose(const spec::Problem& p) {
  if (const Implementation* impl = find(p)) return *impl;
  refuse(p.device, refusals(p));
}

std::string refusal(const spec::Problem& p) { return find(p) != nullptr ? "" : refusals(p); }

const std::vector<const Sla2*>& sla2_implementations() {
  static const std::vector<const Sla2*> list = [] {
    std::vector<const Sla2*> all = cpu::sla2::implementations();
#ifdef SAGEBWD_HAS_CUDA
    const std::vector<const Sla2*> gpu = cuda::sla2_implementations();
    all.insert(all.begin(), gpu.begin(), gpu.end());
#endif
    all.push_back(&ref::linear());
    return all;
  }();
  return list;
}

namespace {

/// The first that accepts, or the pinned one; null: nobody.
const Sla2* find(const spec::LinearProblem& p) {
  const char* pin = pinned();
  for (const Sla2* impl : sla2_implementations())
    if ((pin == nullptr || std::string(pin) == impl->name) && impl->decline(p).empty()) return impl;
  return nullptr;
}

std::string refusals(const spec::LinearProblem& p) {
  const char* pin = pinned();
  const auto reason_of = [&](const std::string& name) -> std::string {
    for (const Sla2* impl : sla2_implementations()) {
      if (name != impl->name) continue;
      const std::string reason = impl->decline(p);
      return reason.empty() ? std::string("SAGEBWD_IMPL pins ") + pin : reason;
    }
    return "has no linear branch";
  };
  std::string text;
  for (const Implementation* impl : implementations())
    text += std::string("\n  ") + impl->name + ": " + reason_of(impl->name);
  return text;
}

}  // namespace

const Sla2& choose(const spec::LinearProblem& p) {
  if (const Sla2* impl = find(p)) return *impl;
  refuse(p.device, refusals(p));
}

std::string refusal(const spec::LinearProblem& p) { return find(p) != nullptr ? "" : refusals(p); }

const backend::Mix& mix_on(Device device) {
  for (const Sla2* impl : sla2_implementations())
    if (impl->mix != nullptr && impl->mix->device == device) return *impl->mix;
  SAGE_THROW(ErrorKind::unsupported, "this build has no CUDA backend; " << kHowToGetCuda);
}

}  // namespace sagebwd::dispatch
