// SPDX-License-Identifier: Apache-2.0
// One implementation per micro-kernel table, as of attention. The mix has no vector code of its
// own.
#include <array>
#include <string>

#include "cpu/sla2/linear.h"
#include "cpu/sla2/mix.h"
#include "cpu/sla2/sla2.h"

namespace sagebwd::cpu::sla2 {
namespace {

constexpr int kMaxTables = 4;

const isa::Kernels& table(int i) {
  int count = 0;
  return *isa::tables(&count)[i];
}

std::string decline(const isa::Kernels& kernels, const spec::LinearProblem& p) {
  if (p.device != Device::cpu) return "runs on CPU memory only";
  if (p.mixes) return "has a linear branch that does not mix";
  if (p.has_averages) return "keeps no averages of the linear branch";
  if (p.has_means) return "makes the means of the linear branch itself";
  const char* reason = kernels.unavailable();
  return reason == nullptr ? "" : std::string("this CPU: ") + reason;
}

/// backend::Sla2 holds plain function pointers, so the table's index is a template parameter.
template <int kTable>
backend::Sla2 make() {
  using spec::LinearProblem;
  return {
      .name = table(kTable).name,
      .decline = [](const LinearProblem& p) { return decline(table(kTable), p); },
      .workspace = linear_workspace,
      .forward = [](const LinearProblem& p, const LinearForwardArgs& a,
                    void* ws) { linear_forward(table(kTable), p, a, ws); },
      .backward = [](const LinearProblem& p, const LinearBackwardArgs& a,
                     void* ws) { linear_backward(table(kTable), p, a, ws); },
      .mix = &mix_calls(),
  };
}

}  // namespace

std::vector<const backend::Sla2*> implementations() {
  int count = 0;
  isa::tables(&count);
  static const std::array<backend::Sla2, kMaxTables> all = [&] {
    std::array<backend::Sla2, kMaxTables> list{};
    if (count > 0) list[0] = make<0>();
    if (count > 1) list[1] = make<1>();
    if (count > 2) list[2] = make<2>();
    if (count > 3) list[3] = make<3>();
    return list;
  }();
  std::vector<const backend::Sla2*> out;
  for (int i = 0; i < count; ++i) out.push_back(&all[static_cast<size_t>(i)]);
  return out;
}

}  // namespace sagebwd::cpu::sla2
