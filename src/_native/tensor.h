// The layout of tensors that other libraries own, by the buffer protocol, or else by DLPack.
#pragma once

#include <nanobind/ndarray.h>

#include <vector>

#include "span.h"

namespace tw {

// Memory of another library, lent by DLPack: a Python object with the buffer protocol, for what is contiguous.
class Lent {
  public:
    // Throws a Python error: what the exporter says, or BufferError for what is not on the CPU.
    static Lent from(nanobind::handle owner);
    const char* data() const { return static_cast<const char*>(array_.data()); }
    u64 nbytes() const { return array_.nbytes(); }
    bool contiguous() const;

    bool writable = true;

  private:
    friend class Tensor;
    nanobind::ndarray<nanobind::ro> array_;
};

// The elements of a tensor in the order of its indices, wherever they lie: strides are in bytes, may be 0 or negative.
class Tensor {
  public:
    explicit Tensor(nanobind::handle owner);  // throws a Python error
    ~Tensor();
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    u64 nbytes() const;
    bool overlaps(const char* begin, u64 length) const;
    // Without any Python: `target` has room for nbytes(). What lies together streams from that size.
    void gather(char* target, bool part) const;

  private:
    void add(u64 length, int64_t stride);
    struct Dimension {
        u64 length;
        int64_t stride;
    };
    const char* data_ = nullptr;
    u64 element_ = 1;                    // bytes that lie together
    std::vector<Dimension> dimensions_;  // outermost first; those of length 1 are left out
    bool empty_ = false;
    Py_buffer view_{};
    nanobind::ndarray<nanobind::ro> array_;
};

// Memory that Python owns, as a span. Throws a Python error.
std::shared_ptr<Span> borrow(nanobind::object owner);

void bind_tensors(nanobind::module_& m);

}  // namespace tw
