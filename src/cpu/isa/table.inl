// SPDX-License-Identifier: Apache-2.0
// Fills in the micro-kernel table from the functions of gemm.inl, tile.inl and prep.inl. Included
// once per instruction set, inside its namespace.

constexpr Kernels make_table(const char* name, const char* (*unavailable)(),
                             decltype(Kernels::store_bf16) store_bf16 = nullptr) {
  return {.name = name,
          .unavailable = unavailable,
          .flip = kFlip,
          .p_levels = kPLevels,
          .store_ss = store_ss,
          .row_us = row_us,
          .row_ss = row_ss,
          .column_ss = column_ss,
          .blend_su = blend_su,
          .store_f32 = store_f32,
          .add_f32 = add_f32,
          .blend_f32 = blend_f32,
          .store_bf16 = store_bf16,
          .forward_tile = forward_tile,
          .backward_tile = backward_tile,
          .load_rows = load_rows,
          .store_rows = store_rows,
          .sum_rows = sum_rows,
          .subtract_row = subtract_row,
          .row_dots = row_dots,
          .add_values = add_values,
          .row_magnitudes = row_magnitudes,
          .rotate_rows = rotate_rows,
          .rotate_rows_back = rotate_rows_back,
          .encode_rows = encode_rows,
          .decode_rows = decode_rows,
          .sum_row_codes = sum_row_codes,
          .sum_column_codes = sum_column_codes,
          .pack_along_rows = pack_along_rows,
          .pack_along_columns = pack_along_columns,
          .transpose_codes = transpose_codes,
          .transpose_f32 = transpose_f32};
}
