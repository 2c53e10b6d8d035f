// SPDX-License-Identifier: Apache-2.0
#include "trace/metrics.h"

#include <cmath>
#include <limits>

namespace sagebwd::trace {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kBadRow = 0.5;
constexpr double kZeroRow = 1e-6;

/// a / b for norms and dot products, where 0 / 0 means "nothing to compare".
double ratio(double a, double b, double if_both_zero) {
  return a == 0 && b == 0 ? if_both_zero : a / b;
}

}  // namespace

template <typename T>
void ErrorStats::add(const T* value, const double* reference, int64_t n, int64_t row) {
  double error_error = 0, error_ref = 0, ref_ref = 0, value_value = 0, value_ref = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double x = static_cast<double>(value[i]), r = reference[i];
    const double e = x - r;
    error_error += e * e, error_ref += e * r, ref_ref += r * r;
    value_value += x * x, value_ref += x * r;
  }
  count += n;
  error_error_ += error_error, error_ref_ += error_ref, ref_ref_ += ref_ref;
  value_value_ += value_value, value_ref_ += value_ref;
  if (static_cast<int64_t>(rows_.size()) <= row) rows_.resize(static_cast<size_t>(row) + 1);
  rows_[row].error += error_error, rows_[row].ref += ref_ref;
  rows_[row].present = true;
}

void ErrorStats::add_row(const float* value, const double* reference, int64_t n, int64_t row) {
  add(value, reference, n, row);
}
void ErrorStats::add_row(const double* value, const double* reference, int64_t n, int64_t row) {
  add(value, reference, n, row);
}

void ErrorStats::append(const ErrorStats& other) {
  count += other.count;
  error_error_ += other.error_error_, error_ref_ += other.error_ref_, ref_ref_ += other.ref_ref_;
  value_value_ += other.value_value_, value_ref_ += other.value_ref_;
  rows_.insert(rows_.end(), other.rows_.begin(), other.rows_.end());
}

void ErrorStats::finish() {
  cosine = ratio(value_ref_, std::sqrt(value_value_) * std::sqrt(ref_ref_),
                 error_error_ == 0 ? 1.0 : 0.0);
  rel_l2 = ratio(std::sqrt(error_error_), std::sqrt(ref_ref_), 0.0);
  projection = ratio(error_ref_, ref_ref_, 0.0);

  int64_t present = 0, bad = 0;
  for (const Row& r : rows_) present += r.present;
  const double rms_row = present > 0 ? std::sqrt(ref_ref_ / static_cast<double>(present)) : 0.0;
  worst_row = -1, worst_row_error = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].present) continue;
    const double ref = std::sqrt(rows_[i].ref);
    double error = ratio(std::sqrt(rows_[i].error), ref < kZeroRow * rms_row ? rms_row : ref, 0.0);
    if (std::isnan(error)) error = kInf;
    bad += error > kBadRow;
    if (worst_row >= 0 && error <= worst_row_error) continue;
    worst_row = static_cast<int64_t>(i), worst_row_error = error;
  }
  bad_row_fraction = present > 0 ? static_cast<double>(bad) / static_cast<double>(present) : 0.0;
}

}  // namespace sagebwd::trace
