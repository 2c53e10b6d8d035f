// SPDX-License-Identifier: Apache-2.0
#include "progress.h"

#include <unistd.h>

#include <cstdio>

#include "options.h"

namespace sagebwd::cli {

Progress::Progress(int steps, Talk talk)
    : steps_(steps),
      rewrite_(talk == Talk::automatic && isatty(STDERR_FILENO) != 0),
      lines_(talk == Talk::verbose) {}

Progress::~Progress() {
  if (rewrite_ && finished_ > 0) std::fputs("\r\033[K", stderr);
}

void Progress::done(const std::string& given) {
  const std::string what = printable(given);
  const std::lock_guard<std::mutex> lock(mutex_);
  ++finished_;
  if (rewrite_)
    std::fprintf(stderr, "\r\033[K[%d/%d] %.0f s  %s", finished_, steps_, seconds(), what.c_str());
  if (lines_)
    std::fprintf(stderr, "[%d/%d] %.1f s  %s\n", finished_, steps_, seconds(), what.c_str());
  std::fflush(stderr);
}

double Progress::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace sagebwd::cli
