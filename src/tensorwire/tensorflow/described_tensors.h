// Tensors and the headers of edges: what crosses is described by one, and made of one that has come.
//
// Numbers are sent as they are. TensorFlow encodes what a header cannot describe: strings, variants, dtypes that only
// TensorFlow has, and more dimensions than a header has room for.
#pragma once

#include <climits>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "keyed_ends.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor.pb.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_op_registry.h"
#include "tensorflow/core/framework/variant_tensor_data.h"
#include "tensorflow/core/platform/errors.h"

namespace tensorwire {

inline std::vector<DataType> dtypes;  // by their numbers in headers; set before the first operator runs

// The number of a dtype; -1: it has none.
inline int number_of(DataType dtype) {
    for (size_t number = 0; number < dtypes.size(); ++number)
        if (dtypes[number] == dtype) return static_cast<int>(number);
    return -1;
}

inline bool encoded(DataType dtype, int rank) { return rank > TW_MOST_DIMENSIONS || number_of(dtype) < 0; }

// `payload`: what the tensor was encoded as; empty: it was not.
inline tw_header header_of(int64_t step, const Tensor& tensor, const std::string& payload) {
    tw_header header{};
    header.step = static_cast<uint64_t>(step);
    header.kind = payload.empty() ? TW_TENSOR : TW_ENCODED;
    header.dtype = payload.empty() ? static_cast<uint8_t>(number_of(tensor.dtype())) : TW_BYTES;
    header.rank = payload.empty() ? static_cast<uint8_t>(tensor.dims()) : 1;
    header.nbytes = header.lengths[0] = payload.size();
    if (!payload.empty()) return header;
    header.nbytes = tensor.tensor_data().size();
    for (int dim = 0; dim < tensor.dims(); ++dim) header.lengths[dim] = static_cast<uint64_t>(tensor.dim_size(dim));
    return header;
}

// ---- what TensorFlow encodes

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

inline absl::Status encode(const Tensor& tensor, std::string* payload) {
    TF_RETURN_IF_ERROR(check_encodable(tensor));
    TensorProto proto;
    if (tensor.dtype() == DT_VARIANT) tensor.AsProtoField(&proto);
    else tensor.AsProtoTensorContent(&proto);
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

// The peer may lie.
inline absl::Status decode(DataType dtype, const std::string& payload, Tensor* tensor) {
    const auto no = [](const char* why) { return errors::DataLoss(why); };
    TensorProto proto;
    TensorShape shape;
    if (!proto.ParseFromString(payload) || proto.dtype() != dtype) return no("it is not encoded as TensorFlow does it");
    if (!TensorShape::BuildTensorShape(proto.tensor_shape(), &shape).ok()) return no("its lengths cannot be");
    // An element takes a byte or more: so few bytes cannot make us allocate many elements.
    if (static_cast<uint64_t>(shape.num_elements()) > payload.size()) return no("it has fewer bytes than elements");
    if (dtype == DT_VARIANT) {
        proto.clear_tensor_content();
        if (proto.variant_val_size() != shape.num_elements()) return no("it has another number of elements");
        for (const VariantTensorDataProto& each : proto.variant_val())
            if (!decodes_safely(each)) return no("it is not encoded as TensorFlow does it");
    }
    return tensor->FromProto(proto) ? absl::OkStatus() : no("TensorFlow cannot decode it");
}

// ---- a tensor that is arriving

// The memory of a slot. OwnsMemory is false, or an operator might write its result there.
class InSlot : public TensorBuffer {
  public:
    InSlot(const void* data, size_t nbytes, void* edge, uint64_t slot) : TensorBuffer(const_cast<void*>(data)), nbytes_(nbytes), edge_(edge), slot_(slot) {}
    ~InSlot() override { edges->release(edge_, slot_); }
    size_t size() const override { return nbytes_; }
    TensorBuffer* root_buffer() override { return this; }
    bool OwnsMemory() const override { return false; }
    void FillAllocationDescription(AllocationDescription* description) const override {
        description->set_requested_bytes(static_cast<int64_t>(nbytes_));
        description->set_allocator_name("tensorwire");
    }

  private:
    const size_t nbytes_;
    void* const edge_;
    const uint64_t slot_;
};

class Arriving {
  public:
    // Memory for what its header describes; null, and why in `refused`, if that is no tensor of that dtype. `whole`: where
    // it may stay, in that slot; null: nowhere.
    void* allocate(const tw_header& header, DataType dtype, const void* whole, void* edge, uint64_t slot) {
        refused = described(header, dtype, whole, edge, slot);
        if (!refused.ok()) return nullptr;
        if (!header.nbytes) return this;  // where nothing is written
        return payload_.empty() ? const_cast<char*>(tensor_.tensor_data().data()) : payload_.data();
    }

    // The tensor, once all of its bytes are there, or why there is none.
    absl::StatusOr<Tensor> finish(DataType dtype) {
        Tensor tensor = std::move(tensor_);
        const std::string payload = std::move(payload_);
        tensor_ = Tensor();
        payload_ = std::string();
        if (!payload.empty()) TF_RETURN_IF_ERROR(decode(dtype, payload, &tensor));
        return tensor;
    }

    int64_t step = 0;
    absl::Status refused;

  private:
    absl::Status described(const tw_header& header, DataType dtype, const void* whole, void* edge, uint64_t slot) {
        const absl::Status no_memory = errors::ResourceExhausted("there is no memory for ", header.nbytes, " bytes");
        step = static_cast<int64_t>(header.step);
        if (step < 1) return errors::Aborted("a tensor of step ", step, " came");
        if (header.kind == TW_ENCODED) {
            if (header.nbytes < 1 || header.nbytes > INT_MAX) return errors::Aborted("an encoded tensor of ", header.nbytes, " bytes came");
            try {
                payload_.resize(header.nbytes);
            } catch (const std::exception&) {
                return no_memory;
            }
            return absl::OkStatus();
        }
        if (header.dtype != number_of(dtype)) return errors::Aborted("a tensor of dtype number ", header.dtype, " came, and not of ", DataTypeString(dtype));
        TensorShape shape;
        const absl::Status built = TensorShape::BuildTensorShape(absl::MakeConstSpan(reinterpret_cast<const int64_t*>(header.lengths), header.rank), &shape);
        if (!built.ok()) return errors::Aborted("a tensor came whose lengths cannot be: ", built.message());
        if (static_cast<uint64_t>(shape.num_elements()) * DataTypeSize(dtype) != header.nbytes) return errors::Aborted("a tensor came that does not lie contiguous");
        if (whole && header.nbytes) {
            core::RefCountPtr<TensorBuffer> buffer(new InSlot(whole, header.nbytes, edge, slot));
            tensor_ = Tensor(dtype, shape, std::move(buffer));
            return absl::OkStatus();
        }
        tensor_ = Tensor(cpu_allocator(), dtype, shape);
        return header.nbytes && !tensor_.IsInitialized() ? no_memory : absl::OkStatus();
    }

    Tensor tensor_;        // of numbers
    std::string payload_;  // of what is encoded
};

}  // namespace tensorwire
