// SPDX-License-Identifier: Apache-2.0
// Everything a C++ caller needs.
#pragma once

#include "sagebwd/attention.h"
#include "sagebwd/build.h"
#include "sagebwd/linear.h"
#include "sagebwd/mix.h"
#include "sagebwd/version.h"
