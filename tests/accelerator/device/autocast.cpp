// torch.autocast("sim"): PyTorch's own lists of operators for devices. They are not the CPU's list.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {  // where the macros of autocast_mode.h work

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
    AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
    AT_FORALL_FP32(FULL)
#undef FULL
}

}  // namespace at::autocast
