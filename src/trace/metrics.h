// SPDX-License-Identifier: Apache-2.0
// How far a tensor is from its reference. Sums are in FP64 and rows may arrive in pieces, so that
// score matrices can be compared tile by tile.
#pragma once

#include <cstdint>
#include <vector>

namespace sagebwd::trace {

struct ErrorStats {
  /// Adds n values of row `row` (0, 1, …). A row may come in several calls, and rows in any order.
  void add_row(const float* value, const double* reference, int64_t n, int64_t row);
  void add_row(const double* value, const double* reference, int64_t n, int64_t row);
  /// Appends another tensor's rows behind this one's, e.g. one head after the other.
  void append(const ErrorStats& other);
  /// Computes the figures below from everything added so far.
  void finish();

  int64_t count = 0;  // values compared
  double cosine = 1;  // <value, ref> / (|value| |ref|)
  /// |value - ref| / |ref|; infinite if the reference is zero and the value is not.
  double rel_l2 = 0;
  /// <value - ref, ref> / <ref, ref>: the systematic part, negative when the value is too small.
  double projection = 0;
  /// Largest |value - ref| / |ref| of a row, and its index; -1 if nothing was added. If |ref| is
  /// below 1e-6 of the RMS row, the error is taken relative to the RMS row instead: such a row has
  /// no relative error. NaN counts as infinite.
  double worst_row_error = 0;
  int64_t worst_row = -1;
  double bad_row_fraction = 0;  // rows with an error above 50 %

 private:
  struct Row {
    double error = 0, ref = 0;  // squared norms
    bool present = false;
  };
  template <typename T>
  void add(const T* value, const double* reference, int64_t n, int64_t row);

  double error_error_ = 0, error_ref_ = 0, ref_ref_ = 0, value_value_ = 0, value_ref_ = 0;
  std::vector<Row> rows_;
};

}  // namespace sagebwd::trace
