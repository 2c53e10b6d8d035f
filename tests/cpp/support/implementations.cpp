// SPDX-License-Identifier: Apache-2.0
#include "support/implementations.h"

#include <stdexcept>

namespace sagebwd::testing {

const dispatch::Implementation& implementation(const std::string& name) {
  for (const dispatch::Implementation* impl : dispatch::implementations())
    if (name == impl->name) return *impl;
  throw std::invalid_argument("no implementation is called " + name);
}

std::string unavailable(const dispatch::Implementation& impl) {
  spec::Problem plain{};
  plain.device = Device::cpu;
  plain.b = plain.h = plain.hk = plain.nq = plain.nk = 1;
  plain.d = 64;
  return impl.decline(plain);
}

const dispatch::Implementation& fastest() {
  for (const dispatch::Implementation* impl : dispatch::implementations())
    if (unavailable(*impl).empty()) return *impl;
  throw std::logic_error("no implementation runs on this machine");
}

std::vector<std::string> all_implementations() {
  std::vector<std::string> names;
  for (const dispatch::Implementation* impl : dispatch::implementations())
    names.emplace_back(impl->name);
  return names;
}

std::vector<std::string> production_implementations() {
  std::vector<std::string> names = all_implementations();
  std::erase(names, "ref");
  return names;
}

std::vector<const dispatch::Implementation*> available_production() {
  std::vector<const dispatch::Implementation*> found;
  for (const std::string& name : production_implementations())
    if (unavailable(implementation(name)).empty()) found.push_back(&implementation(name));
  return found;
}

std::vector<std::string> kernel_tables() {
  int count = 0;
  const cpu::isa::Kernels* const* tables = cpu::isa::tables(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(tables[i]->name);
  return names;
}

const cpu::isa::Kernels& kernel_table(const std::string& name) {
  int count = 0;
  const cpu::isa::Kernels* const* tables = cpu::isa::tables(&count);
  for (int i = 0; i < count; ++i)
    if (name == tables[i]->name) return *tables[i];
  throw std::invalid_argument("no micro-kernel table is called " + name);
}

std::string test_name(const ::testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
}

}  // namespace sagebwd::testing
