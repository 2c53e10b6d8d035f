// SPDX-License-Identifier: Apache-2.0
// Stands for the room sm90 where a build leaves it out, because it is for other GPUs alone.
#include "cuda/sm90/implementation.h"

namespace sagebwd::cuda::sm90 {

const backend::Implementation& implementation() {
  static const backend::Implementation impl{
      .name = "cuda-sm90",
      .decline = [](const spec::Problem&) -> std::string { return "is not part of this build"; },
      .tiles = nullptr,
      .workspace = nullptr,
      .forward = nullptr,
      .backward = nullptr,
  };
  return impl;
}

}  // namespace sagebwd::cuda::sm90
