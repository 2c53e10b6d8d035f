// SPDX-License-Identifier: Apache-2.0
// The CPU backend as the dispatcher sees it: one implementation per micro-kernel table.
#include <array>
#include <string>

#include "cpu/backward.h"
#include "cpu/cpu.h"
#include "cpu/forward.h"
#include "cpu/plan.h"

namespace sagebwd::cpu {
namespace {

constexpr int kMaxTables = 4;

const isa::Kernels& table(int i) {
  int count = 0;
  return *isa::tables(&count)[i];
}

size_t workspace(const isa::Kernels& kernels, const spec::Problem& p) {
  return p.direction == spec::Direction::forward ? forward_workspace(kernels, p)
                                                 : backward_workspace(kernels, p);
}

std::string decline(const isa::Kernels& kernels, const spec::Problem& p) {
  if (p.device != Device::cpu) return "runs on CPU memory only";
  const char* reason = kernels.unavailable();
  return reason == nullptr ? "" : std::string("this CPU: ") + reason;
}

/// backend::Implementation holds plain function pointers, so the table's index is a template
/// parameter.
template <int kTable>
backend::Implementation make() {
  return {
      .name = table(kTable).name,
      .decline = [](const spec::Problem& p) { return decline(table(kTable), p); },
      .tiles = [](const spec::Problem& p) { return tiles_of(p, table(kTable)); },
      .workspace = [](const spec::Problem& p) { return workspace(table(kTable), p); },
      .forward = [](const spec::Problem& p, const ForwardArgs& a,
                    void* ws) { forward(table(kTable), p, a, ws); },
      .backward = [](const spec::Problem& p, const BackwardArgs& a,
                     void* ws) { backward(table(kTable), p, a, ws); },
  };
}

}  // namespace

std::vector<const backend::Implementation*> implementations() {
  int count = 0;
  isa::tables(&count);
  static const std::array<backend::Implementation, kMaxTables> all = [&] {
    std::array<backend::Implementation, kMaxTables> list{};
    if (count > 0) list[0] = make<0>();
    if (count > 1) list[1] = make<1>();
    if (count > 2) list[2] = make<2>();
    if (count > 3) list[3] = make<3>();
    return list;
  }();
  std::vector<const backend::Implementation*> out;
  for (int i = 0; i < count; ++i) out.push_back(&all[static_cast<size_t>(i)]);
  return out;
}

}  // namespace sagebwd::cpu
