// Sparse tensors, such as the gradients of embeddings. Their indices and values are tensors of the device. An operator
// on one waits for the device: most of CUDA's do too, because how many entries come out depends on values.
#include "operators.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {

using at::Tensor;

namespace {

at::SparseTensorImpl* impl_of(const Tensor& tensor) {
    return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

template <class Change>
Tensor with_parts(const Tensor& tensor, Change change) {
    const at::SparseTensorImpl* impl = impl_of(tensor);
    const Tensor indices = change(impl->indices()), values = change(impl->values());
    return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), values.options().layout(at::kSparse),
                                         impl->coalesced());
}

Tensor on_cpu(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    return tensor.is_sparse() ? with_parts(tensor, alias_on_cpu) : alias_on_cpu(tensor);
}

Tensor on_device(c10::Device device, const Tensor& tensor) {
    const auto move = [=](const Tensor& part) { return moved_to(device, part); };
    return tensor.is_sparse() ? with_parts(tensor, move) : move(tensor);
}

// A sparse tensor that an operator has changed has other indices and values; a dense one has changed where it is.
void update(c10::Device device, const Tensor& given, const Tensor& found) {
    if (!is_ours(given) || !given.is_sparse()) return;
    TORCH_CHECK_NOT_IMPLEMENTED(given.sizes() == found.sizes(),
                                "a sparse tensor of the simulated accelerator stays as large as it is");
    const at::SparseTensorImpl* from = impl_of(found);
    const Tensor indices = moved_to(device, from->indices()), values = moved_to(device, from->values());
    impl_of(given)->set_indices_and_values_unsafe(indices, values);
    impl_of(given)->set_coalesced(from->coalesced());
}

void run_sparse_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const c10::FunctionSchema& schema = op.schema();
    const size_t count = schema.arguments().size();
    const torch::jit::Stack args(stack->end() - static_cast<int64_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    const c10::Device device = device_of(op, args);
    c10::DeviceGuard guard(device);
    BelowAutograd below;
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::SparseCPU),
                                "the CPU, and so the simulated accelerator, has no sparse kernel for ",
                                op.operator_name());
    torch::jit::Stack results = with_tensors(args, on_cpu, at::kCPU);
    const torch::jit::Stack changed = results;
    run_and_wait(current_queue(device.index()), [&] {
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::SparseCPU), &results);
    });
    for (size_t n = 0; n < count; n++) {
        if (!writes(schema.arguments()[n]) || !args[n].isTensor()) continue;
        update(device, args[n].toTensor(), changed[n].toTensor());
    }
    for (size_t n = 0; n < results.size(); n++) {
        const auto at = argument_of(schema, n);
        const auto move = [&](const Tensor& found) { return on_device(device, found); };
        stack->push_back(at ? args[*at] : with_tensors(results[n], move, device));
    }
}

// ---- making one: of a device's tensors, which PyTorch makes on the current device

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
    c10::OptionalDeviceGuard guard(device);
    return at::native::empty_sparse(sizes, dtype, layout, device, pinned, format);
}

Tensor with_dims(int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned) {
    c10::OptionalDeviceGuard guard(device);
    return at::native::new_with_dims_sparse(sparse_dim, dense_dim, sizes, dtype, layout, device, pinned);
}

Tensor with_tensors_and_dims(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef sizes, const Tensor& indices,
                             const Tensor& values, std::optional<at::ScalarType> dtype,
                             std::optional<at::Layout> layout, std::optional<at::Device> device,
                             std::optional<bool> pinned, std::optional<bool> coalesced) {
    c10::DeviceGuard guard(values.device());
    return at::native::new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, sizes, indices, values, dtype,
                                                              layout, device, pinned, coalesced);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_sparse_operator>());
}

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {  // what only looks at the parts, or puts them together
    m.impl("empty.memory_format", empty);
    m.impl("_sparse_coo_tensor_with_dims", with_dims);
    m.impl("_sparse_coo_tensor_with_dims_and_tensors", with_tensors_and_dims);
    m.impl("sparse_resize_", at::native::sparse_resize_);
    m.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
    m.impl("sparse_dim", at::native::sparse_dim_sparse);
    m.impl("dense_dim", at::native::dense_dim_sparse);
    m.impl("_nnz", at::native::_nnz_sparse);
    m.impl("is_coalesced", at::native::is_coalesced_sparse);
    m.impl("_coalesced_", at::native::_coalesced_sparse_);
    m.impl("_indices", at::native::_indices_sparse);
    m.impl("_values", at::native::_values_sparse);
    m.impl("indices", at::native::indices_sparse);
    m.impl("values", at::native::values_sparse);
    m.impl("clone", at::native::clone_sparse);
    m.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
    m.impl("copy_", at::native::copy_sparse_wrapper_);
}

}  // namespace simulated
