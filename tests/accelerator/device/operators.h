// How operators compute on the CPU what a stream of the device runs later.
#pragma once
#include "simulated.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <optional>

namespace simulated {

// Kernels run below autograd, autocast and the modes of Python, whatever the thread is in that happens to run them.
struct BelowAutograd {
    c10::impl::ForceDispatchKeyGuard keys{
        c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
        c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Python,
                                 c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
                                 c10::DispatchKey::PythonDispatcher})};
    at::NoGradGuard no_grad;
};

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// `made` is seen as `tensor` is: as its conjugate, as a number of Python.
at::Tensor marked_like(at::Tensor made, const at::Tensor& tensor);
// A tensor of the CPU that has a device tensor's memory. It owns nothing: memory that is reused too early is to show.
at::Tensor alias_on_cpu(const at::Tensor& tensor);
// Sets the sizes, and takes more memory if they need it.
void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);
// A device's tensor with these sizes and strides.
at::Tensor like_on(c10::Device device, const at::Tensor& tensor);
// One with the values of a CPU's, at once: nothing that is pending has to do with memory that is just allocated.
at::Tensor moved_to(c10::Device device, const at::Tensor& tensor);

// Runs any operator of the CPU on a device's tensors.
void run_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);
// Runs it after all that the stream has, and waits. Raises what it raises.
void run_and_wait(Queue& queue, const std::function<void()>& run);

// ---- operators and their arguments

bool writes(const c10::Argument& argument);
// The argument that a result is, if it is one.
std::optional<size_t> argument_of(const c10::FunctionSchema& schema, size_t result);
// Where an operator runs.
c10::Device device_of(const c10::OperatorHandle& op, const torch::jit::Stack& args);

template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
    if (value.isTensor()) {
        if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector())
            if (tensor.defined()) visit(tensor);
    } else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
            if (tensor && tensor->defined()) visit(*tensor);
    }
}

template <class Change>
c10::IValue with_tensors(const c10::IValue& value, Change change, c10::Device device) {
    if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector())
            list.push_back(tensor.defined() ? change(tensor) : tensor);
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
            list.push_back(tensor && tensor->defined() ? std::optional(change(*tensor)) : tensor);
        return list;
    }
    return value.isDevice() ? c10::IValue(device) : value;
}

template <class Change>
torch::jit::Stack with_tensors(const torch::jit::Stack& values, Change change, c10::Device device) {
    torch::jit::Stack made;
    for (const c10::IValue& value : values) made.push_back(with_tensors(value, change, device));
    return made;
}

}  // namespace simulated
