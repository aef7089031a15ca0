// Files of memory, mapped by Python.
#pragma once

#include <nanobind/nanobind.h>

namespace tw {

void bind_file_maps(nanobind::module_& m);

}  // namespace tw
