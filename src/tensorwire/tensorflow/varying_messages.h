// What crosses a varying edge: each tensor is a message, of one chunk or more, each of which takes one slot.
//
// The first chunk begins with a header and the lengths of the tensor. A small payload follows there; a larger one begins with
// the next chunk, so that it is sent from where it lies. Numbers are sent as they are; strings and variants are encoded
// by TensorFlow.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorwire {

using namespace tensorflow;

struct MessageHeader {
    int64_t step;
    uint64_t nbytes;  // of the payload
    int32_t dtype;    // TensorFlow's number
    int32_t rank;
};
static_assert(sizeof(MessageHeader) == 24);

constexpr uint64_t small_payload = 4096;  // below it a payload shares the chunk of its header: less than this is not lent
constexpr uint64_t least_chunk = sizeof(MessageHeader) + 8 * TensorShape::MaxDimensions() + small_payload;
inline uint64_t chunk_bytes = 0;  // of each slot; set before the first operator runs

inline bool encoded(DataType dtype) { return dtype == DT_STRING || dtype == DT_VARIANT; }
inline uint64_t front_bytes(int rank) { return sizeof(MessageHeader) + sizeof(int64_t) * rank; }

inline std::string front_of(int64_t step, DataType dtype, const TensorShape& shape, uint64_t nbytes) {
    const MessageHeader header{step, nbytes, static_cast<int32_t>(dtype), shape.dims()};
    std::string front(reinterpret_cast<const char*>(&header), sizeof header);
    for (const int64_t length : shape.dim_sizes()) front.append(reinterpret_cast<const char*>(&length), sizeof length);
    return front;
}

// Reads what a message begins with. The peer may lie, and may change it meanwhile: each number is read once, and checked.
inline absl::Status read_front(const char* slot, DataType dtype, MessageHeader* header, TensorShape* shape) {
    std::memcpy(header, slot, sizeof *header);
    if (header->dtype != dtype)
        return errors::Aborted("a tensor of dtype number ", header->dtype, " came, and not of ", DataTypeString(dtype));
    if (header->step < 1) return errors::Aborted("a tensor of step ", header->step, " came");
    if (header->rank < 0 || header->rank > TensorShape::MaxDimensions())
        return errors::Aborted("a tensor of ", header->rank, " dimensions came");
    std::vector<int64_t> lengths(header->rank);
    std::memcpy(lengths.data(), slot + sizeof *header, sizeof(int64_t) * lengths.size());
    const absl::Status built = TensorShape::BuildTensorShape(lengths, shape);  // refuses negative ones, and too many elements
    if (!built.ok()) return errors::Aborted("a tensor came whose lengths cannot be: ", built.message());
    const uint64_t elements = static_cast<uint64_t>(shape->num_elements());
    // An encoded element takes a byte or more: so few bytes cannot make us allocate many elements.
    const bool fits = encoded(dtype) ? elements <= header->nbytes && header->nbytes <= INT_MAX
                                     : static_cast<unsigned __int128>(elements) * DataTypeSize(dtype) == header->nbytes;
    if (!fits) return errors::Aborted("a tensor of shape ", shape->DebugString(), " came in ", header->nbytes, " bytes");
    return absl::OkStatus();
}

// ---- strings and variants

// Whether TensorFlow has an encoder and a decoder for what is in a tensor, at any depth.
inline absl::Status check_encodable(const Tensor& tensor) {
    if (tensor.dtype() == DT_RESOURCE) return errors::Unimplemented("it holds a resource, which cannot leave its worker");
    if (tensor.dtype() != DT_VARIANT) return absl::OkStatus();
    const auto values = tensor.flat<Variant>();
    for (int64_t i = 0; i < values.size(); ++i) {
        if (values(i).is_empty()) continue;
        const std::string type = values(i).TypeName();
        if (!UnaryVariantOpRegistry::Global()->GetDecodeFn(type))
            return errors::Unimplemented("it holds a ", type, ", for which TensorFlow has no decoder");
        VariantTensorData data;
        values(i).Encode(&data);
        for (const Tensor& each : data.tensors()) TF_RETURN_IF_ERROR(check_encodable(each));
    }
    return absl::OkStatus();
}

// The payload of a tensor of strings or variants.
inline absl::Status encode(const Tensor& tensor, std::string* payload) {
    TF_RETURN_IF_ERROR(check_encodable(tensor));
    TensorProto proto;
    if (tensor.dtype() == DT_STRING) {
        tensor.AsProtoTensorContent(&proto);
        *payload = std::move(*proto.mutable_tensor_content());
        if (payload->size() > INT_MAX) return errors::Unimplemented("it takes more than 2 GiB");
        return absl::OkStatus();
    }
    tensor.AsProtoField(&proto);
    proto.clear_tensor_shape();  // the header has it
    if (proto.ByteSizeLong() > INT_MAX) return errors::Unimplemented("it takes more than 2 GiB");
    if (!proto.SerializeToString(payload)) return errors::Unimplemented("TensorFlow cannot encode it");
    return absl::OkStatus();
}

// Whether TensorFlow decodes these safely: it does not check the lengths in the content of tensors of variants.
inline bool decodes_safely(const VariantTensorDataProto& variant) {
    for (const TensorProto& tensor : variant.tensors()) {
        if (tensor.dtype() == DT_RESOURCE) return false;
        if (tensor.dtype() != DT_VARIANT) continue;
        if (!tensor.tensor_content().empty()) return false;
        for (const VariantTensorDataProto& each : tensor.variant_val())
            if (!decodes_safely(each)) return false;
    }
    return true;
}

inline absl::Status decode(DataType dtype, const TensorShape& shape, std::string&& payload, Tensor* tensor) {
    TensorProto proto;
    if (dtype == DT_STRING) *proto.mutable_tensor_content() = std::move(payload);
    else if (!proto.ParseFromString(payload)) return errors::DataLoss("it is not encoded as TensorFlow does it");
    proto.set_dtype(dtype);
    shape.AsProto(proto.mutable_tensor_shape());
    if (dtype == DT_VARIANT) {
        proto.clear_tensor_content();
        if (proto.variant_val_size() != shape.num_elements()) return errors::DataLoss("it has another number of elements");
        for (const VariantTensorDataProto& each : proto.variant_val())
            if (!decodes_safely(each)) return errors::DataLoss("it is not encoded as TensorFlow does it");
    }
    if (!tensor->FromProto(proto)) return errors::DataLoss("TensorFlow cannot decode it");
    return absl::OkStatus();
}

// ---- a message that is arriving

class Arriving {
  public:
    // Takes the next chunk. After an error nothing more can be read: the peer does not keep to the format, or there is no
    // memory for what it sends.
    absl::Status take(const char* slot, DataType dtype) {
        if (!slot) return errors::Aborted("a chunk lies where nothing is lent");
        const char* from = slot;
        if (!begun_) {
            TF_RETURN_IF_ERROR(read_front(slot, dtype, &header_, &shape_));
            TF_RETURN_IF_ERROR(allocate(dtype));
            begun_ = true;
            at_ = 0;
            from += front_bytes(header_.rank);
            if (header_.nbytes >= small_payload) return absl::OkStatus();
        }
        const uint64_t length = std::min(header_.nbytes - at_, chunk_bytes);
        if (length) std::memcpy(data_ + at_, from, length);
        at_ += length;
        return absl::OkStatus();
    }

    bool complete() const { return begun_ && at_ == header_.nbytes; }
    int64_t step() const { return header_.step; }
    uint64_t nbytes() const { return header_.nbytes; }

    // The tensor, or why there is none. The next chunk begins another message.
    absl::StatusOr<Tensor> finish(DataType dtype) {
        begun_ = false;
        Tensor tensor = std::move(tensor_);
        tensor_ = Tensor();
        std::string payload = std::move(payload_);
        payload_ = std::string();
        if (encoded(dtype)) TF_RETURN_IF_ERROR(decode(dtype, shape_, std::move(payload), &tensor));
        return tensor;
    }

  private:
    absl::Status allocate(DataType dtype) {
        data_ = nullptr;
        if (encoded(dtype)) {
            try {
                payload_.resize(header_.nbytes);
                data_ = payload_.data();
            } catch (const std::bad_alloc&) {
            }
        } else {
            tensor_ = Tensor(cpu_allocator(), dtype, shape_);
            if (tensor_.IsInitialized()) data_ = const_cast<char*>(tensor_.tensor_data().data());
        }
        if (header_.nbytes && !data_) return errors::ResourceExhausted("there is no memory for ", header_.nbytes, " bytes");
        return absl::OkStatus();
    }

    bool begun_ = false;
    MessageHeader header_{};
    TensorShape shape_;
    Tensor tensor_;        // of numbers
    std::string payload_;  // of strings or variants
    char* data_ = nullptr;
    uint64_t at_ = 0;  // bytes that are there
};

}  // namespace tensorwire
