// SPDX-License-Identifier: Apache-2.0
// Block lists of a case: a pure function of the case string and, for `mass`, of its inputs.
#pragma once

#include <vector>

#include "spec/attn_case.h"
#include "trace/inputs.h"

namespace sagebwd::trace {

/// Block lists with their memory.
struct Lists {
  std::vector<int32_t> index, count;
  BlockLists shape;  // without pointers

  BlockLists view() const {
    BlockLists lists = shape;
    lists.index = index.data();
    lists.count = count.data();
    return lists;
  }
};

/// Empty for a case without lists. `documents` cut the tokens of the case as they do in a call.
/// Rows have fewer entries where fewer blocks have any mass, or a document has few.
Lists make_lists(const spec::AttnCase& c, const Inputs& in, const Documents& documents = {});

}  // namespace sagebwd::trace
