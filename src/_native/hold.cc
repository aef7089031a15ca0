// Memory that is lent for as long as anybody looks into it.
#include <nanobind/nanobind.h>

#include "memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tw {
namespace {

// A part of a span, with the buffer protocol. `give_back(token)` is called once: by release(), or when this object and
// every buffer of it are gone. The owner is not the span's Python object: what is lent keeps memory, not devices.
class Hold {
  public:
    Hold(const Memory& memory, u64 offset, u64 nbytes, nb::object give_back, nb::object token)
        : nbytes(nbytes), span_(memory.span), offset_(offset), give_back_(std::move(give_back)), token_(std::move(token)) {
        check(memory, offset, nbytes);
    }

    ~Hold() {
        if (!give_back_) return;
        if (!Py_IsInitialized()) {
            give_back_.release();
            token_.release();
            return;
        }
        const nb::error_scope kept;  // it may be dropped while an exception is on its way
        PyObject* result = PyObject_CallOneArg(give_back_.ptr(), token_.ptr());
        if (!result) PyErr_WriteUnraisable(give_back_.ptr());
        Py_XDECREF(result);
    }

    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    void release() {
        const nb::object token = std::move(token_);  // a part that was released keeps no whole
        if (const nb::object give_back = std::move(give_back_)) give_back(token);
    }

    bool released() const { return !give_back_; }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
        const Hold& h = *nb::inst_ptr<Hold>(nb::handle(self));
        char* at = h.span_->base + h.offset_;
        return PyBuffer_FillInfo(view, self, at, static_cast<Py_ssize_t>(h.nbytes), h.span_->writable ? 0 : 1, flags);
    }

    const u64 nbytes;

  private:
    const std::shared_ptr<Span> span_;
    const u64 offset_;
    nb::object give_back_, token_;
};

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(Hold::get_buffer)}, {0, nullptr}};

}  // namespace

void bind_holds(nb::module_& m) {
    nb::class_<Hold>(m, "Hold", "A part of memory that is given back once: by release(), or when nobody looks into it any more.", nb::type_slots(slots))
        .def(nb::init<const Memory&, u64, u64, nb::object, nb::object>(), "memory"_a, "offset"_a, "nbytes"_a, "give_back"_a, "token"_a,
             "Raises IndexError for bytes outside of the memory.")
        .def_ro("nbytes", &Hold::nbytes)
        .def_prop_ro("released", &Hold::released)
        .def("release", &Hold::release, "Calls `give_back(token)`, unless that was done.");
}

}  // namespace tw
