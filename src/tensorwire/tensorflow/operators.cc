// TensorFlow's side of edges: a send and a receive that block no thread of the executor.
//
// TensorwireSend completes once it has handed its tensor over; a table keeps the tensor until it has left.
// TensorwireReceive completes when its tensor has arrived. Its output may be the memory of the edge's slot, which returns
// to the producer when TensorFlow releases it.
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "incoming.h"
#include "keyed_ends.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"

namespace {

using namespace tensorflow;
using namespace tensorwire;

class SendKernel : public KeyedKernel {
  public:
    using KeyedKernel::KeyedKernel;

    void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
        const Tensor& tensor = c->input(0);
        auto sending = std::make_unique<Sending>();
        if (encoded(tensor.dtype(), tensor.dims())) {  // before it takes a number: what cannot be encoded is no send
            const absl::Status status = encode(tensor, &sending->payload);
            OP_REQUIRES_ASYNC(c, status.ok(), absl::Status(status.code(), "tensorwire: " + key_ + " cannot carry this tensor: " + std::string(status.message())), done);
        } else {
            sending->tensor = tensor;
        }
        int64_t number = 0;
        bool waits = false;
        OP_REQUIRES_OK_ASYNC(c, begin_send(c, &number, &waits), done);
        sending->end = end_;
        sending->key = key_;
        sending->header = header_of(number, tensor, sending->payload);
        if (waits) sending->done = done;
        when_known(*end_, [sending = sending.release()] { sending->begin(); });
        if (!waits) done();
    }

  private:
    // A tensor that has not left.
    struct Sending {
        std::shared_ptr<End> end;
        std::string key;
        Tensor tensor;
        std::string payload;  // encoded, instead of the tensor
        tw_header header;
        DoneCallback done;

        void begin() {
            if (!end->edge) return finish(errors::Aborted(end->failure));
            const char* data = payload.empty() ? tensor.tensor_data().data() : payload.data();
            edges->send(end->edge, &header, data, [](void* self, int outcome) {
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

REGISTER_OP("TensorwireSend")
    .Input("tensor: T")
    .Input("step: int64")
    .Output("token: float")
    .Attr("T: type")
    .Attr("shape: shape")  // what the receive takes, for the gradient
    .Attr("key: string")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);
REGISTER_OP("TensorwireReceive")
    .Input("anchor: float")
    .Input("step: int64")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("key: string")
    .Attr("copy: bool = false")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ExplicitShape);
REGISTER_KERNEL_BUILDER(Name("TensorwireSend").Device(DEVICE_CPU), SendKernel);
REGISTER_KERNEL_BUILDER(Name("TensorwireReceive").Device(DEVICE_CPU), ReceiveKernel);

}  // namespace

// ---- for Python

// `numbers`: of each dtype of headers the number that it has in TensorFlow; 0: none.
extern "C" int tensorwire_begin(const tw_async_edges* functions, const int* numbers, uint64_t count) {
    if (functions->version != TENSORWIRE_ASYNC_EDGES_VERSION) return 0;
    edges = functions;
    for (uint64_t i = 0; i < count; ++i) dtypes.push_back(static_cast<DataType>(numbers[i]));
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
