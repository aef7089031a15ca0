#include "tensor.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {

namespace {
constexpr int cpu = 1, cuda_host = 3, rocm_host = 11;  // kDLCPU, and the same page-locked

template <size_t N>
void pick(char* target, const char* source, u64 count, int64_t stride) {
    for (u64 i = 0; i < count; i++, source += stride, target += N) memcpy(target, source, N);
}

void pick(char* target, const char* source, u64 count, int64_t stride, u64 element) {
    switch (element) {
        case 1: return pick<1>(target, source, count, stride);
        case 2: return pick<2>(target, source, count, stride);
        case 4: return pick<4>(target, source, count, stride);
        case 8: return pick<8>(target, source, count, stride);
        case 16: return pick<16>(target, source, count, stride);
        default:
            for (u64 i = 0; i < count; i++, source += stride, target += element) copy(target, source, element);
    }
}

nb::object capsule_of(nb::handle owner, bool& writable) {
    const nb::object device = owner.attr("__dlpack_device__")();
    const int kind = nb::cast<int>(device[0]);
    if (kind != cpu && kind != cuda_host && kind != rocm_host)
        throw nb::buffer_error("it is not in the CPU's memory: copy it there first, such as by .cpu()");
    const nb::object exporter = owner.attr("__dlpack__");
    try {
        return exporter();
    } catch (nb::python_error& error) {  // read-only memory can only be exported by the newer form
        if (!error.matches(PyExc_BufferError)) throw;
        writable = false;
        try {
            return exporter("max_version"_a = nb::make_tuple(1, 0));
        } catch (nb::python_error&) {
        }
        throw;
    }
}
}  // namespace

Lent Lent::from(nb::handle owner) {
    Lent lent;
    const nb::object capsule = capsule_of(owner, lent.writable);
    if (!nb::try_cast(capsule, lent.array_)) throw nb::buffer_error("its DLPack form cannot be read");
    // What wraps or stands for a tensor says that it is on the CPU, and lies at 0.
    if (!lent.array_.data() && lent.array_.size())
        throw nb::buffer_error("it has no memory: a fake, functional or wrapper tensor, or one whose storage was freed");
    return lent;
}

bool Lent::contiguous() const {
    int64_t expected = 1;
    for (size_t i = array_.ndim(); i-- > 0;) {
        if (array_.shape(i) != 1 && array_.stride(i) != expected) return array_.size() == 0;
        expected *= static_cast<int64_t>(array_.shape(i));
    }
    return true;
}

Tensor::Tensor(nb::handle owner) {
    if (PyObject_CheckBuffer(owner.ptr())) {
        if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_STRIDED_RO) != 0) throw nb::python_error();
        data_ = static_cast<const char*>(view_.buf);
        element_ = static_cast<u64>(view_.itemsize);
        for (int i = 0; i < view_.ndim; i++) add(static_cast<u64>(view_.shape[i]), view_.strides[i]);
    } else {
        array_ = Lent::from(owner).array_;
        data_ = static_cast<const char*>(array_.data());
        element_ = array_.itemsize();
        for (size_t i = 0; i < array_.ndim(); i++) add(array_.shape(i), array_.stride(i) * static_cast<int64_t>(element_));
    }
    // What lies together is copied together.
    while (!dimensions_.empty() && dimensions_.back().stride == static_cast<int64_t>(element_)) {
        element_ *= dimensions_.back().length;
        dimensions_.pop_back();
    }
}

Tensor::~Tensor() {
    if (view_.obj) PyBuffer_Release(&view_);
}

void Tensor::add(u64 length, int64_t stride) {
    if (length == 0) empty_ = true;
    if (length == 1) return;
    if (!dimensions_.empty() && dimensions_.back().stride == stride * static_cast<int64_t>(length)) {
        dimensions_.back() = {dimensions_.back().length * length, stride};
        return;
    }
    dimensions_.push_back({length, stride});
}

u64 Tensor::nbytes() const {
    u64 total = empty_ ? 0 : element_;
    for (const Dimension& d : dimensions_) total *= d.length;
    return total;
}

bool Tensor::overlaps(const char* begin, u64 length) const {
    if (!nbytes() || !length) return false;
    const char *low = data_, *high = data_ + element_;
    for (const Dimension& d : dimensions_) {
        const int64_t reach = static_cast<int64_t>(d.length - 1) * d.stride;
        (reach < 0 ? low : high) += reach;
    }
    return low < begin + length && begin < high;
}

void Tensor::gather(char* target, bool part) const {
    if (!nbytes()) return;
    if (dimensions_.empty()) return copy(target, data_, element_, part);
    const Dimension inner = dimensions_.back();
    std::vector<u64> at(dimensions_.size() - 1, 0);
    for (const char* row = data_;; ) {
        pick(target, row, inner.length, inner.stride, element_);
        target += inner.length * element_;
        size_t i = at.size();
        for (; i-- > 0; at[i] = 0) {
            const Dimension& d = dimensions_[i];
            if (++at[i] < d.length) {
                row += d.stride;
                break;
            }
            row -= d.stride * static_cast<int64_t>(d.length - 1);
        }
        if (i > at.size()) return;  // every index came round
    }
}

namespace {
int get_lent(PyObject* self, Py_buffer* view, int flags) {
    const Lent& l = *nb::inst_ptr<Lent>(nb::handle(self));
    void* at = const_cast<char*>(l.data());
    return PyBuffer_FillInfo(view, self, at, static_cast<Py_ssize_t>(l.nbytes()), l.writable ? 0 : 1, flags);
}

PyType_Slot lent_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_lent)}, {0, nullptr}};

void gather(nb::object target, nb::object source, bool part) {
    Py_buffer room;
    if (PyObject_GetBuffer(target.ptr(), &room, PyBUF_WRITABLE) != 0) throw nb::python_error();
    const std::unique_ptr<Py_buffer, decltype(&PyBuffer_Release)> keep(&room, &PyBuffer_Release);
    char* to = static_cast<char*>(room.buf);
    const u64 nbytes = static_cast<u64>(room.len);
    const Tensor tensor(source);
    if (tensor.nbytes() != nbytes)
        throw nb::value_error(("it has " + std::to_string(tensor.nbytes()) + " bytes, and the room is " + std::to_string(nbytes)).c_str());
    if (tensor.overlaps(to, nbytes)) throw nb::value_error("it lies in the memory that it would be copied to");
    if (nbytes < release_gil_bytes) return tensor.gather(to, part);
    Unlocked unlocked;
    tensor.gather(to, part);
}
}  // namespace

// A shape over memory of any owner. DLPack is the only way to show types that Python's own buffers have no name for.
nb::object shaped(const nb::object& owner, const std::vector<size_t>& shape, uint8_t code, uint8_t bits) {
    const nb::object memory = nb::steal(PyMemoryView_FromObject(owner.ptr()));
    if (!memory.is_valid()) throw nb::python_error();
    const Py_buffer& view = *PyMemoryView_GET_BUFFER(memory.ptr());
    u64 nbytes = bits / 8;
    for (const size_t length : shape)
        if (__builtin_mul_overflow(nbytes, length, &nbytes)) throw nb::value_error("a shape beyond all memory");
    if (nbytes != static_cast<u64>(view.len)) throw nb::value_error("the memory is not of that shape's size");
    const nb::dlpack::dtype type{code, bits, 1};
    if (view.readonly) return nb::cast(nb::ndarray<nb::array_api, nb::ro>(view.buf, shape.size(), shape.data(), memory, nullptr, type));
    return nb::cast(nb::ndarray<nb::array_api>(view.buf, shape.size(), shape.data(), memory, nullptr, type));
}

std::shared_ptr<Span> borrow(nb::object owner) {
    if (!PyObject_CheckBuffer(owner.ptr()) && nb::hasattr(owner, "__dlpack__")) {
        Lent lent = Lent::from(owner);
        if (!lent.contiguous()) throw nb::buffer_error("it is not contiguous: make a contiguous copy of it first");
        owner = nb::cast(std::move(lent));
    }
    auto span = Span::wrap(owner.ptr());
    if (!span) throw nb::python_error();
    return span;
}

void bind_tensors(nb::module_& m) {
    nb::class_<Lent>(m, "Lent", "Memory of another library, lent by DLPack.", nb::type_slots(lent_slots));
    m.def("shaped", &shaped, "owner"_a, "shape"_a, "code"_a, "bits"_a,
          "The memory of `owner` as a tensor of DLPack, in C order; `code` and `bits` are those of its DLDataType.");
    m.def("gather", &gather, "target"_a, "source"_a, "part"_a = false,
          "Copies a tensor's elements, strided or not, in the order of its indices: as a `part` of more than caches hold.");
}

}  // namespace tw
