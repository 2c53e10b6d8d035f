// SPDX-License-Identifier: Apache-2.0
// Pages are made by the Python package: the program hands it what is on a page. The environment
// variable SAGEBWD_PYTHON names the Python that has the package; who starts the program by the
// package's own command `sagebwd` has it set.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace sagebwd::cli {

bool has_page_maker();
/// Throws an Error with the remedy if there is none. `option` asked for a page.
void need_page_maker(const char* option);
/// The file `path` from the record, whose "page" says what is on it.
void make_page(const nlohmann::json& record, const std::string& path);

}  // namespace sagebwd::cli
