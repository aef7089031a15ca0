// TensorFlow's side of edges: a send and a receive that block no thread of the executor.
//
// TensorwireSend completes once it has handed its tensor over; a table keeps the tensor until it has left.
// TensorwireReceive completes when its tensor has arrived. Its output is the memory of the edge's slot, which returns
// to the producer when TensorFlow releases it. varying_operators.h has the operators for tensors whose size tracing
// does not know.
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "keyed_ends.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "varying_operators.h"

namespace {

using namespace tensorflow;
using namespace tensorwire;

class SendKernel : public KeyedKernel {
  public:
    using KeyedKernel::KeyedKernel;

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        int64_t number = 0;
        bool waits = false;
        OP_REQUIRES_OK_ASYNC(c, begin_send(c, &number, &waits), done);
        auto* sending = new Sending{end_, key_, c->input(0), number, waits ? done : DoneCallback()};
        when_known(*end_, [sending] { sending->begin(); });
        if (!waits) done();
    }

  private:
    // A tensor that has not left.
    struct Sending {
        std::shared_ptr<End> end;
        std::string key;
        Tensor tensor;
        int64_t step;
        DoneCallback done;

        void begin() {
            if (!end->edge) return finish(errors::Aborted(end->failure));
            const auto data = tensor.tensor_data();
            edges->send(end->edge, step, data.data(), data.size(), [](void* self, int outcome) {
                auto* sending = static_cast<Sending*>(self);
                sending->finish(status_of(*sending->end, outcome, "tensorwire: sending " + sending->key));
            }, this);
        }

        void finish(const absl::Status& status) {
            end_send(*end, status, done);
            delete this;
        }
    };
};

// The memory of a slot. OwnsMemory is false, or an operator might write its result there.
class Received : public TensorBuffer {
  public:
    Received(void* edge, int64_t step, size_t nbytes)
        : TensorBuffer(const_cast<void*>(edges->slot(edge, step))), edge_(edge), step_(step), nbytes_(nbytes) {}
    ~Received() override { edges->release(edge_, step_); }
    size_t size() const override { return nbytes_; }
    TensorBuffer* root_buffer() override { return this; }
    bool OwnsMemory() const override { return false; }
    void FillAllocationDescription(AllocationDescription* description) const override {
        description->set_requested_bytes(static_cast<int64_t>(nbytes_));
        description->set_allocator_name("tensorwire");
    }

  private:
    void* const edge_;
    const int64_t step_;
    const size_t nbytes_;
};

class ReceiveKernel : public KeyedKernel {
  public:
    explicit ReceiveKernel(OpKernelConstruction* c) : KeyedKernel(c) {
        OP_REQUIRES_OK(c, c->GetAttr("T", &dtype_));
        OP_REQUIRES_OK(c, c->GetAttr("shape", &shape_));
        OP_REQUIRES_OK(c, c->GetAttr("copy", &copy_));
    }

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        int64_t number = 0;
        OP_REQUIRES_OK_ASYNC(c, step(c, 1, &number), done);
        if (arrives(number)) {
            put(c, number);
            return done();
        }
        auto receiving = std::make_shared<Receiving>(this, c, std::move(done), number);
        if (CancellationManager* manager = c->cancellation_manager()) {
            receiving->token = manager->get_cancellation_token();
            if (!manager->RegisterCallback(receiving->token, [receiving] { receiving->cancel(); })) {
                c->SetStatus(errors::Cancelled("tensorwire: receiving ", key_, " was cancelled"));
                return receiving->done();
            }
        }
        when_known(*end_, [receiving] { receiving->begin(receiving); });
    }

  private:
    // Whether the tensor is there, perhaps after a short look.
    bool arrives(int64_t step) {
        void* edge = nullptr;
        {
            std::lock_guard<std::mutex> g(end_->mutex);
            edge = end_->edge;
        }
        if (!edge) return false;
        const bool looks = end_->soon && !looking.test_and_set();
        const bool found = edges->arrives(edge, step, looks ? look_seconds : 0);
        if (looks) {
            looking.clear();
            end_->soon = found;
        }
        return found;
    }

    struct Receiving {
        ReceiveKernel* kernel;
        OpKernelContext* context;
        DoneCallback done;
        int64_t step;
        CancellationToken token = CancellationManager::kInvalidToken;
        std::mutex mutex;
        bool begun = false, cancelled = false, over = false;
        uint64_t ticket = 0;
        std::shared_ptr<Receiving> self;  // while the edge will call
        const std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();

        Receiving(ReceiveKernel* k, OpKernelContext* c, DoneCallback d, int64_t n) : kernel(k), context(c), done(std::move(d)), step(n) {}

        void begin(const std::shared_ptr<Receiving>& me) {
            End& end = *kernel->end_;
            if (!end.edge) return finish(errors::Aborted(end.failure));
            {
                std::lock_guard<std::mutex> g(mutex);
                if (cancelled || over) return;
                self = me;
            }
            const uint64_t given = edges->receive(end.edge, step, [](void* at, int outcome) {
                auto* receiving = static_cast<Receiving*>(at);
                const std::shared_ptr<Receiving> me = receiving->self;
                me->arrived(outcome);
            }, this);
            bool late = false;
            {
                std::lock_guard<std::mutex> g(mutex);
                ticket = given;
                late = cancelled && given;
            }
            if (late) give_up();
        }

        void arrived(int outcome) {
            kernel->end_->soon = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count() < look_seconds;
            absl::Status status = status_of(*kernel->end_, outcome, "tensorwire: receiving " + kernel->key_);
            {
                std::lock_guard<std::mutex> g(mutex);
                if (over) return;
                if (status.ok() && !cancelled) kernel->put(context, step);
            }
            finish(status);
        }

        void cancel() {
            {
                std::lock_guard<std::mutex> g(mutex);
                if (over) return;
                cancelled = true;
            }
            give_up();
        }

        void give_up() {
            if (ticket && !edges->cancel(kernel->end_->edge, ticket)) return;  // it is being called
            finish(errors::Cancelled("tensorwire: receiving ", kernel->key_, " was cancelled"));
        }

        void finish(const absl::Status& status) {
            const std::shared_ptr<Receiving> me = self;
            {
                std::lock_guard<std::mutex> g(mutex);
                if (over) return;
                over = true;
                self.reset();
            }
            if (CancellationManager* manager = context->cancellation_manager(); manager && !cancelled) manager->TryDeregisterCallback(token);
            if (!status.ok()) context->SetStatus(status);
            const DoneCallback call = std::move(done);
            call();
        }
    };

    void put(OpKernelContext* c, int64_t step) {
        const size_t nbytes = static_cast<size_t>(shape_.num_elements()) * DataTypeSize(dtype_);
        core::RefCountPtr<TensorBuffer> buffer(new Received(end_->edge, step, nbytes));
        Tensor tensor(dtype_, shape_, std::move(buffer));
        if (!copy_) return c->set_output(0, tensor);
        Tensor* own = nullptr;
        if (!c->allocate_output(0, shape_, &own).ok()) return c->SetStatus(errors::ResourceExhausted("tensorwire: no memory for ", key_));
        std::memcpy(const_cast<char*>(own->tensor_data().data()), tensor.tensor_data().data(), nbytes);
        edges->copied(nbytes);
    }

    DataType dtype_;
    TensorShape shape_;
    bool copy_;
};

absl::Status given_shape(shape_inference::InferenceContext* c) {
    PartialTensorShape shape;
    TF_RETURN_IF_ERROR(c->GetAttr("shape", &shape));
    shape_inference::ShapeHandle handle;
    TF_RETURN_IF_ERROR(c->MakeShapeFromPartialTensorShape(shape, &handle));
    c->set_output(0, handle);
    return absl::OkStatus();
}

absl::Status scalar(shape_inference::InferenceContext* c) {
    c->set_output(0, c->Scalar());
    return absl::OkStatus();
}

REGISTER_OP("TensorwireSend")
    .Input("tensor: T")
    .Input("step: int64")
    .Output("token: float")
    .Attr("T: type")
    .Attr("key: string")
    .SetIsStateful()
    .SetShapeFn(scalar);
REGISTER_OP("TensorwireReceive")
    .Input("anchor: float")
    .Input("step: int64")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("key: string")
    .Attr("copy: bool = false")
    .SetIsStateful()
    .SetShapeFn(given_shape);
REGISTER_OP("TensorwireSendVarying")
    .Input("tensor: T")
    .Input("step: int64")
    .Output("token: float")
    .Attr("T: type")
    .Attr("shape: shape")  // what the receive takes, for the gradient
    .Attr("key: string")
    .SetIsStateful()
    .SetShapeFn(scalar);
REGISTER_OP("TensorwireReceiveVarying")
    .Input("anchor: float")
    .Input("step: int64")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("key: string")
    .SetIsStateful()
    .SetShapeFn(given_shape);
REGISTER_KERNEL_BUILDER(Name("TensorwireSend").Device(DEVICE_CPU), SendKernel);
REGISTER_KERNEL_BUILDER(Name("TensorwireReceive").Device(DEVICE_CPU), ReceiveKernel);
REGISTER_KERNEL_BUILDER(Name("TensorwireSendVarying").Device(DEVICE_CPU), SendVaryingKernel);
REGISTER_KERNEL_BUILDER(Name("TensorwireReceiveVarying").Device(DEVICE_CPU), ReceiveVaryingKernel);

}  // namespace

// ---- for Python

// `chunk`: bytes of a slot of a varying edge.
extern "C" int tensorwire_begin(const tw_async_edges* functions, uint64_t chunk) {
    if (functions->version != TENSORWIRE_ASYNC_EDGES_VERSION || chunk < least_chunk) return 0;
    edges = functions;
    chunk_bytes = chunk;
    return 1;
}

// The end of that key is connected, or, with a `failure`, cannot be.
extern "C" void tensorwire_know(const char* key, void* edge, const char* failure) {
    const std::shared_ptr<End> end = ends().find(key);
    {
        std::lock_guard<std::mutex> g(end->mutex);
        end->edge = edge;
        end->failure = failure;
    }
    for (;;) {  // what comes meanwhile comes after what has waited
        std::vector<std::function<void()>> waiting;
        {
            std::lock_guard<std::mutex> g(end->mutex);
            if (end->waiting.empty()) {
                end->known = true;
                return;
            }
            waiting.swap(end->waiting);
        }
        for (auto& call : waiting) call();
    }
}
