// Tensors that a Python thread exchanges, through an operator that blocks no thread of the executor meanwhile.
//
// TensorwireExchange hands the addresses of its inputs to that thread, which says where results go, and when they have
// arrived. An input for which the thread asks no memory is itself the result. TensorwireFingerprint reads a few
// elements of each tensor and makes a number of them that most likely differs if values differ.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "keyed_ends.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace {

using namespace tensorflow;

constexpr size_t most_looked_at = 64;     // elements of a tensor
constexpr uint64_t fingerprints = uint64_t{1} << 52;  // a double holds each of them

// One run of the operator, until it is done.
struct Exchange {
    OpKernelContext* context;
    AsyncOpKernel::DoneCallback done;
    const std::vector<int>* numbers;  // which tensors the inputs are
    std::vector<Tensor*> outputs;     // those that Python asked memory for
};

// The runs of one key that wait for Python.
struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Exchange*> waiting;
    bool closed = false;
};

tensorwire::Keyed<Queue>& queues() {
    static auto* all = new tensorwire::Keyed<Queue>;
    return *all;
}

absl::Status closed() { return errors::Aborted("tensorwire: this optimizer was closed, or its worker has left the job"); }

void finish(Exchange* exchange, const absl::Status& status) {
    OpKernelContext* context = exchange->context;
    if (!status.ok()) context->SetStatus(status);
    else
        for (int i = 1; i < context->num_inputs(); ++i)
            if (!exchange->outputs[i - 1]) context->set_output(i - 1, context->input(i));
    const AsyncOpKernel::DoneCallback done = std::move(exchange->done);
    delete exchange;
    done();
}

class ExchangeKernel : public AsyncOpKernel {
  public:
    explicit ExchangeKernel(OpKernelConstruction* c) : AsyncOpKernel(c) {
        std::string key;
        OP_REQUIRES_OK(c, c->GetAttr("key", &key));
        OP_REQUIRES_OK(c, c->GetAttr("numbers", &numbers_));
        queue_ = queues().find(key);
    }

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        OP_REQUIRES_ASYNC(c, static_cast<int>(numbers_.size()) == c->num_inputs() - 1, errors::InvalidArgument("tensorwire: as many numbers as tensors"), done);
        auto* exchange = new Exchange{c, std::move(done), &numbers_, std::vector<Tensor*>(numbers_.size())};
        {
            std::lock_guard<std::mutex> g(queue_->mutex);
            if (!queue_->closed) {
                queue_->waiting.push_back(exchange);
                exchange = nullptr;
            }
        }
        if (exchange) return finish(exchange, closed());
        queue_->changed.notify_one();
    }

  private:
    std::vector<int> numbers_;
    std::shared_ptr<Queue> queue_;
};

// FNV-1a, of up to `most_looked_at` elements that lie evenly apart, and the last one.
uint64_t look_at(uint64_t hash, const char* data, size_t nbytes, size_t size) {
    const size_t count = size ? nbytes / size : 0;
    const size_t apart = std::max<size_t>(1, count / most_looked_at);
    const auto add = [&](size_t element) {
        for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<unsigned char>(data[element * size + i])) * 1099511628211u;
    };
    for (size_t element = 0; element < count; element += apart) add(element);
    if (count) add(count - 1);
    return hash;
}

constexpr uint64_t first_hash = 14695981039346656037u;

double folded(uint64_t hash) { return static_cast<double>((hash ^ hash >> 32) % fingerprints); }

class FingerprintKernel : public OpKernel {
  public:
    using OpKernel::OpKernel;

    void Compute(OpKernelContext* c) override {
        Tensor* found = nullptr;
        OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({}), &found));
        uint64_t hash = first_hash;
        for (int i = 0; i < c->num_inputs(); ++i) {
            const auto data = c->input(i).tensor_data();
            hash = look_at(hash, data.data(), data.size(), DataTypeSize(c->input(i).dtype()));
        }
        found->scalar<double>()() = folded(hash);
    }
};

absl::Status same_shapes(shape_inference::InferenceContext* c) {
    for (int i = 1; i < c->num_inputs(); ++i) c->set_output(i - 1, c->input(i));
    return absl::OkStatus();
}

REGISTER_OP("TensorwireExchange")
    .Input("fingerprint: double")
    .Input("values: T")
    .Output("results: T")
    .Attr("T: list(type) >= 0")
    .Attr("key: string")
    .Attr("numbers: list(int)")
    .SetIsStateful()
    .SetShapeFn(same_shapes);
REGISTER_OP("TensorwireFingerprint").Input("values: T").Output("fingerprint: double").Attr("T: list(type) >= 0").SetShapeFn(shape_inference::ScalarShape);
REGISTER_KERNEL_BUILDER(Name("TensorwireExchange").Device(DEVICE_CPU), ExchangeKernel);
REGISTER_KERNEL_BUILDER(Name("TensorwireFingerprint").Device(DEVICE_CPU), FingerprintKernel);

}  // namespace

// ---- for Python

// The next run, and how many tensors it has; null after so many seconds, or when the key is closed.
extern "C" void* tensorwire_exchange_next(const char* key, double seconds, uint64_t* count) {
    const std::shared_ptr<Queue> queue = queues().find(key);
    std::unique_lock<std::mutex> g(queue->mutex);
    queue->changed.wait_for(g, std::chrono::duration<double>(seconds), [&] { return queue->closed || !queue->waiting.empty(); });
    if (queue->waiting.empty()) return nullptr;
    Exchange* exchange = queue->waiting.front();
    queue->waiting.pop_front();
    *count = exchange->numbers->size();
    return exchange;
}

// Its fingerprint, and of each tensor the number, the address and the size in bytes.
extern "C" double tensorwire_exchange_inputs(void* at, uint64_t* numbers, uint64_t* addresses, uint64_t* sizes) {
    auto* exchange = static_cast<Exchange*>(at);
    OpKernelContext* context = exchange->context;
    for (size_t i = 0; i < exchange->numbers->size(); ++i) {
        const auto data = context->input(static_cast<int>(i) + 1).tensor_data();
        numbers[i] = static_cast<uint64_t>((*exchange->numbers)[i]);
        addresses[i] = reinterpret_cast<uint64_t>(data.data());
        sizes[i] = data.size();
    }
    return context->input(0).scalar<double>()();
}

// Memory for the result of tensor `index` of the run; null: there is none left.
extern "C" void* tensorwire_exchange_output(void* at, uint64_t index) {
    auto* exchange = static_cast<Exchange*>(at);
    OpKernelContext* context = exchange->context;
    Tensor*& output = exchange->outputs[index];
    const int place = static_cast<int>(index);
    if (!output && !context->allocate_output(place, context->input(place + 1).shape(), &output).ok()) return nullptr;
    return const_cast<char*>(output->tensor_data().data());
}

// The run is over: with `code`, one of TensorFlow's errors, it has failed.
extern "C" void tensorwire_exchange_done(void* at, int code, const char* failure) {
    finish(static_cast<Exchange*>(at), code ? absl::Status(static_cast<absl::StatusCode>(code), failure) : absl::OkStatus());
}

// The fingerprint of tensors by their addresses, their sizes in bytes, and the sizes of their elements.
extern "C" double tensorwire_fingerprint(uint64_t count, const uint64_t* addresses, const uint64_t* sizes, const uint64_t* elements) {
    uint64_t hash = first_hash;
    for (uint64_t i = 0; i < count; ++i) hash = look_at(hash, reinterpret_cast<const char*>(addresses[i]), sizes[i], elements[i]);
    return folded(hash);
}

// No run of that key will wait any more.
extern "C" void tensorwire_exchange_close(const char* key) {
    const std::shared_ptr<Queue> queue = queues().find(key);
    std::deque<Exchange*> left;
    {
        std::lock_guard<std::mutex> g(queue->mutex);
        queue->closed = true;
        left.swap(queue->waiting);
    }
    queue->changed.notify_all();
    for (Exchange* exchange : left) finish(exchange, closed());
}
