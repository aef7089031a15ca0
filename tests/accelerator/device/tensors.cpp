// Operators that the CPU cannot stand in for: those that make tensors and views, copies, and a few that are refused.
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace simulated {

using at::IntArrayRef;
using at::Tensor;

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ---- tensors

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
    c10::OptionalDeviceGuard on(device);
    return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    c10::OptionalDeviceGuard on(device);
    const auto type = c10::dtype_or_default(dtype);
    return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, type);
}

std::vector<int64_t> dense_strides(IntArrayRef sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (int64_t n = static_cast<int64_t>(sizes.size()) - 2; n >= 0; n--)
        strides[n] = strides[n + 1] * std::max<int64_t>(sizes[n + 1], 1);
    return strides;
}

const Tensor& resize_(const Tensor& tensor, IntArrayRef sizes, std::optional<at::MemoryFormat>) {
    c10::DeviceGuard on(tensor.device());
    if (tensor.sizes() != sizes) resize_to(tensor, sizes, dense_strides(sizes));
    return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
    const auto dense = dense_strides(sizes);
    auto* changed = tensor.unsafeGetTensorImpl();
    changed->set_storage_keep_dtype(std::move(storage));
    changed->set_storage_offset(offset);
    changed->set_sizes_and_strides(sizes, strides.empty() ? IntArrayRef(dense) : strides);
    return tensor;
}

Tensor& set_nothing(Tensor& tensor) {
    c10::DeviceGuard on(tensor.device());
    return set_storage(tensor, empty({0}, at::kByte, {}, tensor.device(), {}, {}).storage(), 0, {0}, {});
}

void record_stream(Tensor& tensor, at::Stream stream) { record_use(tensor.storage().data(), queue_of(stream)); }

// Then `Tensor.data = other` works, and Module.to() keeps its parameters.
bool has_compatible_type(const Tensor&, const Tensor&) { return true; }

// ---- copies

Tensor host_alias(const Tensor& tensor) {
    return marked_like(at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options()), tensor);
}

HostRange range_of(const Tensor& tensor) {
    auto* begin = static_cast<char*>(tensor.data_ptr());
    const size_t item = tensor.dtype().itemsize();
    return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item)};
}

// A copy between memory of the host and memory that kernels see, or within that. `range` is what it uses of the host's.
void copy_later(Queue& queue, const Tensor& to, const Tensor& from, std::optional<HostRange> range = {}) {
    std::optional<HostUse> use;
    if (range) use = begin_host_use(*range);
    enqueue(queue, [to, from, use] {
        if (use) end_host_use(*use);
        BelowAutograd below;
        Tensor target = to;
        at::native::copy_(target, from, false);
    });
}

// One after the other on both devices, as with CUDA.
void copy_on_devices(Queue& queue, const Tensor& from, const Tensor& to) {
    Queue& other = current_queue(to.device().index());
    if (&other != &queue) wait_for(queue, record(other));
    copy_later(queue, alias_on_cpu(to), alias_on_cpu(from));
    if (&other != &queue) wait_for(other, record(queue));
}

// Whether CUDA copies it as it is: else it goes through another tensor.
bool has_same_layout(const Tensor& a, const Tensor& b) {
    if (a.sizes() != b.sizes()) return false;
    if (a.is_contiguous() && b.is_contiguous()) return true;
    return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void copy_to_device(Queue& queue, const Tensor& from, const Tensor& to, bool non_blocking) {
    // CUDA makes the source contiguous on the host first, at once.
    const bool is_direct = from.is_contiguous() || (from.dtype() == to.dtype() && has_same_layout(from, to));
    if (non_blocking && is_direct && is_pinned(range_of(from))) {
        copy_later(queue, alias_on_cpu(to), host_alias(from), range_of(from));
        return;
    }
    copy_later(queue, alias_on_cpu(to), marked_like(from.detach().clone(), from));
    if (!non_blocking) synchronize({&queue});
}

void copy_to_host(Queue& queue, const Tensor& from, const Tensor& to, bool non_blocking) {
    // CUDA converts and makes contiguous on the device, which takes no wait; but not the destination.
    const bool is_direct = to.is_contiguous() || (from.dtype() == to.dtype() && has_same_layout(from, to));
    if (non_blocking && is_direct && is_pinned(range_of(to))) {
        const HostRange range = range_of(to);
        // Who reads it too early is to see it. Another copy may still have to read what is there.
        if (!is_in_use(range)) std::memset(range.begin, kPoison, static_cast<size_t>(range.end - range.begin));
        copy_later(queue, host_alias(to), alias_on_cpu(from), range);
        return;
    }
    copy_later(queue, host_alias(to), alias_on_cpu(from));
    synchronize({&queue});
}

void copy(const Tensor& from, const Tensor& to, bool non_blocking) {
    if (from.numel() == 0 || to.numel() == 0) return;
    const c10::Device device = is_ours(from) ? from.device() : to.device();
    c10::DeviceGuard on(device);
    BelowAutograd below;
    Queue& queue = current_queue(device.index());
    const Tensor whole = from.sizes() == to.sizes() ? from : from.expand_as(to);
    if (!is_ours(from)) return copy_to_device(queue, whole, to, non_blocking);
    if (is_ours(to)) return copy_on_devices(queue, whole, to);
    copy_to_host(queue, whole, to, non_blocking);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
    copy(self, to, non_blocking);
    return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
    if (!is_ours(to)) {
        to.resize_(self.sizes());
    } else if (to.sizes() != self.sizes()) {
        resize_to(to, self.sizes(), self.strides());
    }
    copy(self, to, false);
    return to;
}

at::Scalar item(const Tensor& tensor) {
    const Tensor alias = alias_on_cpu(tensor);
    synchronize({&current_queue(tensor.device().index())});
    BelowAutograd below;
    Locked guard(lock);  // nothing else runs meanwhile
    return at::native::_local_scalar_dense_cpu(alias);
}

// ---- dropout, with the bits that the CPU has

Tensor dropout(const Tensor& input, double p, bool train) {
    TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
    if (p == 0 || !train || input.sym_numel() == 0) return input;
    if (p == 1) return input.mul(at::zeros({}, input.options()));
    Tensor noise = at::empty_like(input).bernoulli_(1 - p);
    return input.mul(noise.div_(1 - p));
}

Tensor& dropout_(Tensor& input, double p, bool train) {
    TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
    if (p == 0 || !train || input.sym_numel() == 0) return input;
    if (p == 1) return input.mul_(at::zeros({}, input.options()));
    Tensor noise = at::empty_like(input).bernoulli_(1 - p);
    return input.mul_(noise.div_(1 - p));
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
    const auto as_mask = input.options().dtype(at::kBool);
    if (input.numel() == 0) return {input, at::empty_like(input, as_mask)};
    if (!train.value_or(true)) return {input.clone(), at::ones_like(input, as_mask)};
    Tensor mask = at::empty_like(input, as_mask).bernoulli_(1 - p);
    return {input.mul(mask).mul_(p == 1 ? 0. : 1 / (1 - p)), mask};
}

// ---- what is refused

void refuse_recurrent(const c10::OperatorHandle&, torch::jit::Stack*) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "LSTM and GRU do not run on the simulated accelerator");
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("resize_", resize_);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("set_", set_nothing);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("is_set_to", at::native::is_set_to);
    m.impl("record_stream", record_stream);
    m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);
    m.impl("dropout", dropout);
    m.impl("dropout_", dropout_);
    m.impl("native_dropout", native_dropout);
    for (const char* name : {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_recurrent>());
}

// On the CPU these are made of other operators, and so are their gradients.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("dropout", dropout);
    m.impl("dropout_", dropout_);
}

// A copy of a conjugate: without these it would be resolved by another copy of it, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace simulated
