// Rows of a table by their numbers.
#pragma once

#include <nanobind/nanobind.h>

namespace tw {

void bind_rows(nanobind::module_& m);

}  // namespace tw
