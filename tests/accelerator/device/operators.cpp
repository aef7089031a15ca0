// Every operator that the CPU has: its arguments become aliases on the CPU, and a stream's task computes with them.
//
// What comes out has to be known before that. In-place operators give nothing new. For others a Meta kernel says sizes
// and types; where it cannot, the operator waits for the device and runs at once, which is what a real device's
// operators such as nonzero do, too.
#include "operators.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <exception>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace simulated {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

at::Tensor marked_like(at::Tensor made, const at::Tensor& tensor) {
    if (!tensor.is_meta()) {
        made._set_conj(tensor.is_conj());
        made._set_neg(tensor.is_neg());
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
}

at::Tensor alias_on_cpu(const at::Tensor& tensor) {
    c10::impl::ExcludeDispatchKeyGuard no_views{DispatchKeySet(DispatchKey::ADInplaceOrView)};
    char* address = alias_of(tensor.numel() ? tensor.data_ptr() : nullptr);
    const auto options = tensor.options().device(at::kCPU);
    return marked_like(at::from_blob(address, tensor.sizes(), tensor.strides(), options), tensor);
}

void resize_to(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
    const size_t item = tensor.dtype().itemsize();
    const size_t needed = at::detail::computeStorageNbytes(sizes, strides, item, tensor.storage_offset());
    if (needed > tensor.storage().nbytes())
        at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

bool writes(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

std::optional<size_t> argument_of(const c10::FunctionSchema& schema, size_t result) {
    const c10::Argument& returned = schema.returns()[result];
    if (!writes(returned)) return std::nullopt;
    for (size_t n = 0; n < schema.arguments().size(); n++) {
        const auto* info = schema.arguments()[n].alias_info();
        if (info && *info == *returned.alias_info()) return n;
    }
    TORCH_CHECK(false, "no argument of ", schema.name(), " is its result ", result);
}

c10::Device device_of(const OperatorHandle& op, const Stack& args) {
    std::optional<c10::Device> named, found;
    for (const IValue& arg : args) {
        if (arg.isDevice()) named = arg.toDevice();
        for_each_tensor(arg, [&](const Tensor& tensor) {
            if (is_ours(tensor) && !found) found = tensor.device();
        });
    }
    if (!found) found = named;
    TORCH_CHECK(found && found->is_privateuseone(), "no device among the arguments of ", op.operator_name());
    return c10::Device(found->type(), index_of(*found));
}

void run_and_wait(Queue& queue, const std::function<void()>& run) {
    std::exception_ptr error;  // for this caller, not for whoever waits next
    enqueue(queue, [&] {
        BelowAutograd below;
        try {
            run();
        } catch (...) {
            error = std::current_exception();
        }
    });
    synchronize({&queue});
    if (error) std::rethrow_exception(error);
}

at::Tensor like_on(c10::Device device, const at::Tensor& tensor) {
    const auto options = tensor.options().device(device);
    return marked_like(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

at::Tensor moved_to(c10::Device device, const at::Tensor& tensor) {
    at::Tensor made = like_on(device, tensor);
    alias_on_cpu(made).copy_(tensor);
    return made;
}

namespace {

// ---- what kernels get for arguments

Tensor copy_of(const Tensor& tensor) { return marked_like(tensor.detach().clone(), tensor); }

// What a task has of an argument: a tensor of the CPU may change before it runs.
Tensor for_task(const Tensor& tensor) { return is_ours(tensor) ? alias_on_cpu(tensor) : copy_of(tensor); }

Tensor for_meta(const Tensor& tensor) {
    if (!is_ours(tensor) && tensor.dim() == 0) return copy_of(tensor);  // numbers have to be on the CPU
    const auto options = tensor.options().device(at::kMeta);
    return marked_like(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

// With values that are good as indices and as probabilities.
Tensor for_dry_run(const Tensor& tensor) {
    if (!is_ours(tensor)) return copy_of(tensor);
    Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    return marked_like(made.fill_(tensor.is_floating_point() ? 1 : 0), tensor);
}

// ---- what is known of an operator

std::optional<size_t> generator_argument(const c10::FunctionSchema& schema) {
    for (size_t n = 0; n < schema.arguments().size(); n++)
        if (schema.arguments()[n].name() == "generator") return n;
    return std::nullopt;
}

bool is_in_place(const c10::FunctionSchema& schema) {
    for (const auto& returned : schema.returns())
        if (!writes(returned)) return false;
    for (const auto& argument : schema.arguments())
        if (argument.is_out()) return false;
    return true;
}

// Whether sizes or results depend on what the device computes.
bool needs_values(const OperatorHandle& op, const Stack& args) {
    // How many random numbers these draw depends on values.
    static const std::set<std::string> draws = {"aten::poisson", "aten::binomial", "aten::_standard_gamma",
                                                "aten::_sample_dirichlet"};
    if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) return true;
    if (draws.count(op.schema().name())) return true;
    for (const auto& returned : op.schema().returns()) {
        const auto kind = returned.type()->kind();
        const bool has_tensors = kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType ||
                                 kind == c10::TypeKind::OptionalType;
        if (!has_tensors) return true;
    }
    bool has_mask = false;  // an index of booleans, whose true ones have to be counted
    for (const IValue& arg : args)
        if (arg.isOptionalTensorList())
            for_each_tensor(arg, [&](const Tensor& index) { has_mask |= index.scalar_type() == at::kBool; });
    return has_mask;
}

// Meta kernels say what CUDA gives. The CPU has other types (of means, with bfloat16) or sizes for these.
bool differs_from_meta(const c10::FunctionSchema& schema) {
    static const std::set<std::string> names = {
        "aten::native_layer_norm", "aten::native_group_norm",         "aten::native_batch_norm",
        "aten::_embedding_bag",    "aten::_native_batch_norm_legit", "aten::_embedding_bag_forward_only"};
    return names.count(schema.name()) != 0;
}

// As a real device: all tensors have to be on one, except for numbers and for a few operators' arguments.
void check_devices(const OperatorHandle& op, const Stack& args, c10::Device device) {
    static const std::set<std::string> takes_cpu = {
        "aten::index",          "aten::_unsafe_index",         "aten::index_put",          "aten::index_put_",
        "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::_pack_padded_sequence"};
    const bool may_be_cpu = takes_cpu.count(op.schema().name());
    for (size_t n = 0; n < args.size(); n++) {
        const bool is_written = writes(op.schema().arguments()[n]);
        for_each_tensor(args[n], [&](const Tensor& tensor) {
            if (tensor.device() == device) return;
            const bool is_fine = tensor.is_cpu() && !is_written && (tensor.dim() == 0 || may_be_cpu);
            TORCH_CHECK(is_fine, "Expected all tensors to be on the same device, but found at least two devices, ",
                        device, " and ", tensor.device(), "! (", op.operator_name(), ")");
        });
    }
}

// The CPU's operator for one that every device has to write itself.
OperatorHandle on_cpu(const OperatorHandle& op, Stack& args) {
    const auto find = [](const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); };
    static const OperatorHandle forward = find("aten::convolution"), backward = find("aten::convolution_backward");
    const std::string& name = op.schema().name();
    if (name == "aten::convolution_overrideable") return forward;
    if (name != "aten::convolution_backward_overrideable") return op;
    const std::vector<int64_t> bias_sizes{args[0].toTensor().size(1)};
    args.insert(args.begin() + 3, IValue(bias_sizes));
    return backward;
}

void run_on_cpu(const OperatorHandle& op, Stack& stack) {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}

// ---- one call of an operator

// What the arguments will be, as far as sizes go, and what the results will be.
struct Forecast {
    Stack args;
    Stack results;
};

struct Call {
    OperatorHandle op;
    Stack args;
    c10::Device device;
    Queue& queue;

    const c10::FunctionSchema& schema() const { return op.schema(); }

    // Nothing if the Meta kernel cannot tell, or there is none.
    std::optional<Forecast> ask_meta() const {
        try {
            Forecast forecast;
            forecast.args = with_tensors(args, for_meta, at::kMeta);
            for (IValue& arg : forecast.args)
                if (arg.isGenerator()) arg = IValue();
            forecast.results = forecast.args;
            op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &forecast.results);
            return forecast;
        } catch (const c10::NotImplementedError&) {
            return std::nullopt;
        } catch (const c10::Error&) {
            throw;
        } catch (const std::exception&) {  // of Python; if the arguments are wrong, the CPU will say so, too
            return std::nullopt;
        }
    }

    // Random numbers are drawn from the state that the generator has now, whenever the kernel runs: that gets a copy,
    // and a run on any values moves the generator itself on.
    Forecast run_dry() {
        Forecast forecast;
        forecast.args = with_tensors(args, for_dry_run, at::kCPU);
        forecast.results = forecast.args;
        Locked guard(lock);  // a kernel that runs may use the generator
        if (op.hasTag(at::Tag::nondeterministic_seeded)) {
            const std::optional<size_t> at = generator_argument(schema());
            TORCH_CHECK_NOT_IMPLEMENTED(at, op.operator_name(), " has no argument for a generator");
            const at::Generator& generator =
                args[*at].isGenerator() ? args[*at].toGenerator() : at::detail::getDefaultCPUGenerator();
            args[*at] = IValue(generator.clone());
        }
        run_on_cpu(op, forecast.results);
        return forecast;
    }

    // Waits for what the stream has, and gives the results.
    void run_now(Stack* stack) const {
        Stack results = with_tensors(args, for_task, at::kCPU);
        run_and_wait(queue, [&] { run_on_cpu(op, results); });
        for (size_t n = 0; n < results.size(); n++) {
            if (const auto at = argument_of(schema(), n)) {
                update(args[*at].toTensor(), results[n].toTensor());
                stack->push_back(args[*at]);
            } else {
                const auto move = [&](const Tensor& found) { return moved_to(device, found); };
                stack->push_back(with_tensors(results[n], move, device));
            }
        }
    }

    // An out argument whose size nobody knew: the kernel has left the memory that it was given.
    void update(const Tensor& given, const Tensor& found) const {
        if (given.sizes() == found.sizes()) return;
        resize_to(given, found.sizes(), found.strides());
        alias_on_cpu(given).copy_(found);
    }

    void grow_outputs(const Forecast& forecast) const {
        for (size_t n = 0; n < args.size(); n++) {
            if (!writes(schema().arguments()[n]) || !args[n].isTensor() || !is_ours(args[n].toTensor())) continue;
            const Tensor& given = args[n].toTensor();
            const Tensor& wanted = forecast.args[n].toTensor();
            if (given.sizes() != wanted.sizes()) resize_to(given, wanted.sizes(), wanted.strides());
        }
    }

    void run_later(const Forecast& forecast, Stack* stack) const;
};

struct NoWarnings final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
} no_warnings;

// What a task computes with, and where its results go.
struct LateCall {
    OperatorHandle op;
    Stack args;
    Stack results;                               // aliases; None where an argument is the result
    std::vector<std::pair<size_t, Tensor>> outs;  // aliases of the out arguments

    void run() const {
        BelowAutograd below;
        c10::WarningUtils::WarningHandlerGuard quiet(&no_warnings);
        Stack values = args;
        // A kernel may resize an out argument on its way, which cannot be done to memory that is not its own. PyTorch
        // warns of that where users do it.
        std::vector<Tensor> temporaries;
        for (const auto& [n, out] : outs) {
            temporaries.push_back(at::empty_strided(out.sizes(), out.strides(), out.options()));
            values[n] = temporaries.back();
        }
        run_on_cpu(op, values);
        for (size_t i = 0; i < outs.size(); i++) outs[i].second.copy_(temporaries[i]);
        for (size_t n = 0; n < values.size(); n++)
            if (!results[n].isNone()) store(values[n], results[n]);
    }

    void store(const IValue& value, const IValue& result) const {
        std::vector<Tensor> found;
        for_each_tensor(value, [&](const Tensor& tensor) { found.push_back(tensor); });
        size_t n = 0;
        for_each_tensor(result, [&](const Tensor& to) {
            const Tensor& from = found.at(n++);
            const bool is_as_expected = from.sizes() == to.sizes() && from.scalar_type() == to.scalar_type();
            TORCH_CHECK(is_as_expected, op.operator_name(), " gave ", from.scalar_type(), from.sizes(),
                        ", but was expected to give ", to.scalar_type(), to.sizes());
            to.copy_(from);
        });
    }
};

void Call::run_later(const Forecast& forecast, Stack* stack) const {
    auto late = std::make_shared<LateCall>(LateCall{op, {}, {}, {}});
    for (size_t n = 0; n < args.size(); n++)
        if (schema().arguments()[n].is_out() && args[n].isTensor() && is_ours(args[n].toTensor()))
            late->outs.emplace_back(n, alias_on_cpu(args[n].toTensor()));
    for (size_t n = 0; n < schema().returns().size(); n++) {
        if (const auto at = argument_of(schema(), n)) {
            late->results.emplace_back();
            stack->push_back(args[*at]);
            continue;
        }
        TORCH_CHECK_NOT_IMPLEMENTED(!schema().returns()[n].alias_info(), "no kernel for the view ", op.operator_name());
        const auto make = [&](const Tensor& tensor) { return like_on(device, tensor); };
        IValue made = with_tensors(forecast.results[n], make, device);
        late->results.push_back(with_tensors(made, alias_on_cpu, at::kCPU));
        stack->push_back(std::move(made));
    }
    late->args = with_tensors(args, for_task, at::kCPU);
    enqueue(queue, [late] { late->run(); });
}

}  // namespace

void run_operator(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    Stack args(stack->end() - static_cast<int64_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    const c10::Device device = device_of(op, args);
    check_devices(op, args, device);
    c10::DeviceGuard on_device(device);
    BelowAutograd below;
    const OperatorHandle cpu_op = on_cpu(op, args);
    TORCH_CHECK_NOT_IMPLEMENTED(cpu_op.hasComputedKernelForDispatchKey(DispatchKey::CPU),
                                "the CPU, and so the simulated accelerator, has no kernel for ", op.operator_name());
    Call call{cpu_op, std::move(args), device, current_queue(device.index())};

    if (needs_values(cpu_op, call.args)) return call.run_now(stack);
    std::optional<Forecast> forecast;
    if (cpu_op.hasTag(at::Tag::nondeterministic_seeded) || differs_from_meta(cpu_op.schema())) {
        forecast = call.run_dry();
    } else if (is_in_place(cpu_op.schema())) {
        forecast = Forecast{call.args, {}};
    } else {
        forecast = call.ask_meta();
    }
    if (!forecast) return call.run_now(stack);
    call.grow_outputs(*forecast);
    call.run_later(*forecast, stack);
}

}  // namespace simulated

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    // For these a device would get composite kernels: with other roundings than the CPU's own, with more waits (index),
    // or which only say that they have to be written.
    for (const char* name :
         {"native_layer_norm", "native_group_norm", "_stack", "_stack.out", "addr", "addr.out", "all.dims",
          "all.dims_out", "any.dims", "any.dims_out", "linalg__powsum", "native_channel_shuffle", "mish_backward",
          "silu_backward", "index.Tensor", "convolution_overrideable", "convolution_backward_overrideable"})
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&simulated::run_operator>());
}
