// SPDX-License-Identifier: Apache-2.0
// Progress of long work on stderr: which step of how many, and the time it has taken so far.
#pragma once

#include <chrono>
#include <mutex>
#include <string>

namespace sagebwd::cli {

/// quiet: nothing. automatic: one line that rewrites itself, on a terminal only. verbose: a line
/// per step, always.
enum class Talk { quiet, automatic, verbose };

class Progress {
 public:
  Progress(int steps, Talk talk);
  ~Progress();
  Progress(const Progress&) = delete;

  /// One more step is done; may be called from any thread.
  void done(const std::string& what);
  double seconds() const;

 private:
  const int steps_;
  const bool rewrite_, lines_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  int finished_ = 0;
};

}  // namespace sagebwd::cli
