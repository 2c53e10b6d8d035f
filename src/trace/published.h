// SPDX-License-Identifier: Apache-2.0
// Published errors of the method that `paper` follows (arXiv 2603.02170): Gaussian inputs,
// deviation sigma in Q and K and 1 in V and dO. The shape is not stated. This is the only copy:
// reports show these figures, and tests compare results with them.
#pragma once

#include <array>
#include <optional>
#include <string>

namespace sagebwd::trace {

struct PublishedErrors {
  double sigma;
  double o, dq, dk, dv;  // relative L2
};

inline constexpr std::array<PublishedErrors, 5> kPublished{{
    {1, .0160, .0184, .0220, .0159},
    {3, .0389, .0758, .0777, .0387},
    {5, .0603, .2014, .2007, .0605},
    {8, .0972, .4666, .4699, .0973},
    {10, .1161, .6648, .6684, .1157},
}};

inline std::optional<double> published_rel_l2(const std::string& tensor, double sigma) {
  for (const PublishedErrors& p : kPublished) {
    if (p.sigma != sigma) continue;
    if (tensor == "O") return p.o;
    if (tensor == "dQ") return p.dq;
    if (tensor == "dK") return p.dk;
    if (tensor == "dV") return p.dv;
  }
  return std::nullopt;
}

}  // namespace sagebwd::trace
